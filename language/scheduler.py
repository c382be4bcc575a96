"""Many requests through one model: continuous batching over a paged cache (Yu et al. 2022, Orca; Kwon et al. 2023).

Legend: B rows, L tokens, V vocabulary.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal

import torch
from torch import Tensor

from ..core.blocks.one_token import OneTokenRunner
from ..core.kv_cache import KVCache, LayeredKVCache, PagedKVCache, PagedPool, PagedSequence, TokenChain, share_prefix
from ..core.kv_cache.base import check_sizes
from ..core.moe import Routing
from ..core.stream import Runner, run_blocks
from .generate import ChosenT, TokenChooser, checked_ids, room_after, rows_are_finite
from .model import LanguageModel
from .padding import padded

EndReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Ticket:
    """Stands for one request of a scheduler; they are numbered in the order they came."""

    number: int


@dataclass(frozen=True, kw_only=True)
class TokenEvent(Generic[ChosenT]):
    """A request's next token, and with the last one why it ended: a token of its `stop_tokens` (`chosen`, here too),
    its `max_tokens` or the end of the context, or an error, which comes without a token and ends this request alone.
    """

    ticket: Ticket
    chosen: ChosenT | None
    finish_reason: EndReason | None = None
    error: Exception | None = None


@dataclass(kw_only=True, eq=False)
class _Request(Generic[ChosenT]):
    """`chain` is the prompt and what was chosen; `sequences` (one per pool) are empty while the request waits."""

    ticket: Ticket
    chain: TokenChain
    chooser: TokenChooser[ChosenT]
    stop_tokens: frozenset[int]
    num_prompt: int
    room: int
    sequences: list[PagedSequence] = field(default_factory=list[PagedSequence])

    @property
    def length(self) -> int:
        """The number of tokens read."""
        return self.sequences[0].length

    @property
    def num_pending(self) -> int:
        """The number of tokens to read before the next one can be chosen."""
        return len(self.chain.tokens) - self.length

    @property
    def num_chosen(self) -> int:
        return len(self.chain.tokens) - self.num_prompt

    @property
    def num_soon(self) -> int:
        """The number of tokens that this request will have read once it has chosen its next token and read that."""
        return min(len(self.chain.tokens) + 1, self.num_prompt + self.room - 1)

    def next_tokens(self, count: int) -> list[int]:
        """The next `count` tokens to read."""
        return self.chain.tokens[self.length : self.length + count]

    def next_key(self) -> bytes | None:
        """The key of the block that would be filled next, if none of it is read and all of its tokens are known."""
        block, within = divmod(self.length, self.chain.block_size)
        return self.chain.key(block) if within == 0 and block < self.chain.num_full else None

    def keys(self, count: int) -> set[bytes]:
        """The keys of the blocks that reading `count` more tokens fills."""
        size = self.chain.block_size
        return {self.chain.key(block) for block in range(self.length // size, (self.length + count) // size)}


class Scheduler(Generic[ChosenT]):
    """Runs requests together; each gets the tokens it would get alone.

    At most `max_rows` requests run at a time, over `num_blocks` blocks of `block_size` tokens of keys and values; the
    others wait, first come first served. A step reads one token of every request that decodes, and up to
    `prefill_chunk` tokens of those that still read their prompts. Equal beginnings of prompts that run at the same time
    are kept, and where possible read, once. Where blocks run out, the youngest request gives its own back and waits to
    be read again. Layers with a sliding window have a second pool, in which requests hold their windows' blocks. A
    scheduler belongs to one thread.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_rows: int,
        num_blocks: int,
        block_size: int = 16,
        prefill_chunk: int = 256,
        routing: Routing | None = None,
    ) -> None:
        check_sizes(max_rows=max_rows, num_blocks=num_blocks, block_size=block_size, prefill_chunk=prefill_chunk)
        self._model = model
        self._max_rows = max_rows
        self._chunk = prefill_chunk
        self._routing = routing
        self._runner: Runner = run_blocks  # until there is a request
        self._layout, self.pools = _pools(model, max_rows, num_blocks, block_size, prefill_chunk)
        self._requests: dict[Ticket, _Request[ChosenT]] = {}
        self._waiting: deque[_Request[ChosenT]] = deque()  # all younger than those that run; both in order of age
        self._running: list[_Request[ChosenT]] = []
        self._events: list[TokenEvent[ChosenT]] = []
        self._num_tickets = 0

    @property
    def num_running(self) -> int:
        """The number of requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for blocks or for one of the rows."""
        return len(self._waiting)

    @property
    def bytes(self) -> int:
        """The size of the pools."""
        return sum(pool.bytes for pool in self.pools)

    def submit(
        self,
        ids: Sequence[int],
        chooser: TokenChooser[ChosenT],
        *,
        max_tokens: int,
        stop_tokens: Collection[int] = (),
    ) -> Ticket:
        """Queue a request for up to `max_tokens` tokens after the prompt `ids`; it ends early at a token of
        `stop_tokens`, or where the context does.

        Raises:
            ValueError: an empty prompt, one that leaves no room in the context or has ids outside the vocabulary,
                `max_tokens` below 1, or a request that does not fit even when it runs alone.
        """
        check_sizes(max_tokens=max_tokens)
        ids = checked_ids(self._model, ids)
        room = min(max_tokens, room_after(self._model, len(ids)))
        for pool in self.pools:
            needed = _most_blocks(pool, len(ids) + room - 1, self._chunk)
            if needed > pool.num_blocks:
                raise ValueError(
                    f"{len(ids)} prompt + {room} new tokens need {needed} blocks of {pool.block_size} tokens; "
                    f"the pool has {pool.num_blocks}"
                )
        if not self._requests:  # nobody waits: whatever has become of the model's parts counts from here on
            self._runner = OneTokenRunner([*self._model.blocks])
        ticket = Ticket(self._num_tickets)
        self._num_tickets += 1
        request = _Request(
            ticket=ticket,
            chain=TokenChain(ids, self.pools[0].block_size),
            chooser=chooser,
            stop_tokens=frozenset(stop_tokens),
            num_prompt=len(ids),
            room=room,
        )
        self._requests[ticket] = request
        self._waiting.append(request)
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """End a request without a further event; its blocks are free at once. Whether it had not ended before."""
        request = self._requests.get(ticket)
        if request is None:
            return False
        self._end(request)
        self._events = [event for event in self._events if event.ticket != ticket]
        return True

    def close(self) -> None:
        """Cancel all requests."""
        for ticket in tuple(self._requests):
            self.cancel(ticket)

    @torch.inference_mode()
    def step(self) -> list[TokenEvent[ChosenT]]:
        """Admit what fits, read once, and give the tokens chosen, at most one per request. An empty list is no end:
        prompts may still be being read (`num_running`).
        """
        self._admit()
        self._read([(request, 1) for request in self._rows_to_decode()])
        self._read(self._rows_to_prefill())
        events, self._events = self._events, []
        return events

    def run_all(self) -> dict[Ticket, list[ChosenT]]:
        """Step until all requests have ended; gives the tokens of each.

        Raises:
            Exception: the first error of a request; the others are then cancelled.
        """
        results: dict[Ticket, list[ChosenT]] = {ticket: [] for ticket in self._requests}
        while self._requests:
            for event in self.step():
                if event.error is not None:
                    self.close()
                    raise event.error
                if event.chosen is not None:
                    results[event.ticket].append(event.chosen)
        return results

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_rows:
            request = self._waiting[0]
            request.sequences = [PagedSequence(pool, request.chain) for pool in self.pools]
            share_prefix(request.sequences)
            if not all(self._has_room_for(sequence, request.num_soon) for sequence in request.sequences):
                _release(request)
                return
            self._running.append(self._waiting.popleft())

    def _has_room_for(self, sequence: PagedSequence, num_tokens: int) -> bool:
        """Whether there are blocks beside those that the prompts being read will take."""
        pool = self.pools.index(sequence.pool)
        owed = (self._num_missing(other.sequences[pool], other.num_pending) for other in self._running)
        return self._num_missing(sequence, num_tokens - sequence.length) + sum(owed) <= sequence.pool.num_free

    def _num_missing(self, sequence: PagedSequence, num_new: int) -> int:
        most = _most_blocks(sequence.pool, sequence.length + num_new, self._chunk)
        return min(sequence.num_missing(num_new), most)

    def _rows_to_decode(self) -> list[_Request[ChosenT]]:
        rows: list[_Request[ChosenT]] = []
        for request in tuple(self._running):
            if request.sequences and request.num_pending == 1 and self._make_room(request, 1):
                rows.append(request)
        return rows

    def _rows_to_prefill(self) -> list[tuple[_Request[ChosenT], int]]:
        """The oldest requests that read their prompts, and how many tokens: as many rows as keep the padded rectangle
        within the chunk. A row whose next block another one fills waits, and will then share it.
        """
        rows: list[tuple[_Request[ChosenT], int]] = []
        filled: set[bytes] = set()
        longest = 0
        for request in tuple(self._running):
            if not request.sequences or request.num_pending < 2:
                continue
            share_prefix(request.sequences)
            if request.next_key() in filled:
                continue
            count = min(request.num_pending, self._chunk)
            if rows and not self._fits_beside(rows, request, max(longest, count)):
                break
            if not self._make_room(request, count):
                break
            rows.append((request, count))
            filled |= request.keys(count)
            longest = max(longest, count)
        return rows

    def _fits_beside(
        self, rows: Sequence[tuple[_Request[ChosenT], int]], request: _Request[ChosenT], longest: int
    ) -> bool:
        """Whether rows of `longest` tokens, padding included, stay within the chunk, and within the context."""
        furthest = max(request.length, *(row.length for row, _ in rows)) + longest
        return (len(rows) + 1) * longest <= self._chunk and furthest <= self._model.config.context_length

    def _make_room(self, request: _Request[ChosenT], num_new: int) -> bool:
        """Reserve blocks for `num_new` tokens, taking them from younger requests if need be; whether it succeeded."""
        while any(sequence.num_missing(num_new) > sequence.pool.num_free for sequence in request.sequences):
            youngest = self._running[-1]
            if youngest is request:
                return False
            self._running.pop()
            _release(youngest)
            self._waiting.appendleft(youngest)
        for sequence in request.sequences:
            sequence.reserve(num_new)
        return True

    def _read(self, rows: Sequence[tuple[_Request[ChosenT], int]]) -> None:
        """One pass over the next tokens of each row, as many as given; those that have read all choose."""
        if not rows:
            return
        counts = [count for _, count in rows]
        longest = max(counts)
        ids = padded([request.next_tokens(count) for request, count in rows])
        logits = self._model.logits(
            ids.to(self._model.embedding.weight.device),
            cache=self._cache([request for request, _ in rows], counts),
            counts=None if min(counts) == longest else torch.tensor(counts),
            last_only=True,
            routing=self._routing,
            runner=self._runner,
        )[:, 0].float()
        for (request, _), row, is_finite in zip(rows, logits, rows_are_finite(logits), strict=True):
            if request.num_pending == 0:
                self._events.append(self._choose(request, row, is_finite))

    def _cache(self, rows: Sequence[_Request[ChosenT]], counts: Sequence[int]) -> KVCache:
        caches = [
            PagedKVCache([request.sequences[n] for request in rows], counts=counts) for n in range(len(self.pools))
        ]
        return LayeredKVCache(caches, self._layout) if len(caches) > 1 else caches[0]

    def _choose(self, request: _Request[ChosenT], logits: Tensor, is_finite: bool) -> TokenEvent[ChosenT]:
        try:
            if not is_finite:
                raise FloatingPointError(
                    f"language model: the logits of token {request.num_chosen} of request {request.ticket.number} "
                    "are not finite"
                )
            chosen = request.chooser.choose(logits)
        except Exception as error:
            self._end(request)
            return TokenEvent(ticket=request.ticket, chosen=None, finish_reason="error", error=error)
        request.chain.tokens.append(chosen.token_id)
        reason: EndReason | None = None
        if chosen.token_id in request.stop_tokens:
            reason = "stop"
        elif request.num_chosen == request.room:
            reason = "length"
        if reason is not None:
            self._end(request)
        return TokenEvent(ticket=request.ticket, chosen=chosen, finish_reason=reason)

    def _end(self, request: _Request[ChosenT]) -> None:
        del self._requests[request.ticket]
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        _release(request)


def _release(request: _Request[ChosenT]) -> None:
    for sequence in request.sequences:
        sequence.release()
    request.sequences = []


def _most_blocks(pool: PagedPool, num_tokens: int, chunk: int) -> int:
    """The most blocks that a sequence of `num_tokens` holds at a time, read at most `chunk` tokens at a time."""
    blocks = -(-num_tokens // pool.block_size)
    if pool.window is None:
        return blocks
    return min(blocks, 1 - (-(pool.window - 1 + chunk) // pool.block_size))


def _pools(
    model: LanguageModel, max_rows: int, num_blocks: int, block_size: int, chunk: int
) -> tuple[list[int], tuple[PagedPool, ...]]:
    """Which pool each layer uses, and the pools: that of the full layers first, each if there are such layers."""
    config, weight = model.config, model.embedding.weight
    windows = [config.window if config.is_sliding(i) else None for i in range(config.layers)]
    windows = [None if window is not None and window >= config.context_length else window for window in windows]
    kinds = sorted(set(windows), key=lambda window: window or 0)
    pools: list[PagedPool] = []
    for window in kinds:
        # more than this, `max_rows` windows cannot hold
        most = num_blocks if window is None else max_rows * (1 - (-(window - 1 + chunk) // block_size))
        pools.append(
            PagedPool(
                layers=windows.count(window),
                num_blocks=min(num_blocks, most),
                kv_heads=config.kv_heads,
                head_width=config.head_width,
                block_size=block_size,
                window=window,
                dtype=weight.dtype,
                device=weight.device,
            )
        )
    return [kinds.index(window) for window in windows], tuple(pools)
