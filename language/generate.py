"""Token by token: the prefill / decode loop of one sequence over a key/value cache.

Prefill reads many tokens at once and is bound by compute; decode reads one at a time and is bound by memory.

Legend: B rows (1 here), L tokens, V vocabulary.
"""

import math
import operator
import reprlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol, SupportsIndex, TypeVar

import torch
from torch import Tensor

from ..core.blocks.one_token import OneTokenRunner
from ..core.kv_cache import ContiguousKVCache, KVCache, LayeredKVCache, RingKVCache
from ..core.kv_cache.base import check_sizes
from ..core.moe import Routing
from .model import LanguageModel
from .sampling import Chooser, Sampling

PREFILL_CHUNK = 512


class Chosen(Protocol):
    """What a chooser gives: a token, and whatever else it tells of it."""

    @property
    def token_id(self) -> int:
        """The token."""
        ...


ChosenT = TypeVar("ChosenT", bound=Chosen)
_ChosenOut = TypeVar("_ChosenOut", bound=Chosen, covariant=True)


class TokenChooser(Protocol[_ChosenOut]):
    """Chooses one request's tokens, one after the other (`sampling.Chooser`)."""

    def choose(self, logits: Tensor) -> _ChosenOut:
        """The next token, from the finite logits [V] that follow everything so far."""
        ...


def generate_ids(
    model: LanguageModel,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    stop: Collection[int],
    banned: Collection[int] = (),
) -> Iterator[int]:
    """The ids that follow `prompt` by `sampling`, as `generate_tokens` gives them. `banned` tokens never come."""
    chooser = Chooser(sampling, prompt, banned=banned)
    tokens = generate_tokens(model, prompt, chooser, max_tokens=sampling.max_tokens, stop_tokens=stop)
    return (chosen.token_id for chosen in tokens)


def generate_tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    chooser: TokenChooser[ChosenT],
    *,
    max_tokens: int,
    stop_tokens: Collection[int] = (),
    cache: KVCache | None = None,
    chunk: int = PREFILL_CHUNK,
    routing: Routing | None = None,
) -> Iterator[ChosenT]:
    """The tokens that follow `prompt`, each as soon as it is chosen: up to `max_tokens`, to one of `stop_tokens` (given
    as the last one), or until the context is full.

    The prompt is read `chunk` tokens at a time, then each token in a pass of its own; the last one is not read. With a
    `cache` (of one row), `prompt` follows what it holds, and it then holds what was read; otherwise the generator has
    its own, which goes when it is closed. `routing` is told which experts were used. Bad arguments are refused here,
    not at the first token.

    Raises:
        ValueError: an empty prompt, one that leaves no room in the context or has ids outside the vocabulary, or a
            number below 1.
        FloatingPointError: (at the token) logits that are not finite.
    """
    check_sizes(max_tokens=max_tokens, chunk=chunk)
    if cache is not None and cache.batch != 1:
        raise ValueError(f"the cache has {cache.batch} rows; one sequence needs a cache of 1")
    num_past = 0 if cache is None else int(cache.lengths[0])
    ids = checked_ids(model, prompt)
    room = min(max_tokens, room_after(model, len(ids), num_past=num_past))
    return _tokens(model, ids, chooser, room, stop_tokens, cache, chunk, routing)


def checked_ids(model: LanguageModel, ids: Iterable[SupportsIndex]) -> list[int]:
    """A prompt's ids as plain numbers.

    Raises:
        ValueError: no list of whole numbers, or one outside the vocabulary.
    """
    size = model.config.vocab_size
    try:
        numbers = [operator.index(each) for each in ids]
    except TypeError as error:
        raise ValueError(f"the prompt is {reprlib.repr(ids)}; it must be a list of tokens' ids") from error
    for each in numbers:
        if not 0 <= each < size:
            raise ValueError(f"the prompt has the id {each}; ids go from 0 to {size - 1}")
    return numbers


def room_after(model: LanguageModel, num_prompt: int, *, num_past: int = 0) -> int:
    """The number of tokens that the context takes after a prompt that follows `num_past` others.

    Raises:
        ValueError: no prompt, or no room after it.
    """
    context = model.config.context_length
    if num_prompt < 1:
        raise ValueError("the prompt has no tokens; it needs at least one")
    if num_past + num_prompt >= context:
        limit = f"at most {context - 1 - num_past} leave room in the context of {context}"
        past = f" after the {num_past} tokens read before" if num_past else ""
        raise ValueError(f"the prompt has {num_prompt} tokens; {limit}{past}")
    return context - num_past - num_prompt


@torch.inference_mode()
def prefill(
    model: LanguageModel,
    prompt: Sequence[int],
    cache: KVCache,
    *,
    chunk: int = PREFILL_CHUNK,
    routing: Routing | None = None,
) -> Tensor:
    """Read `prompt` into `cache` (of one row), `chunk` tokens at a time; gives the logits [V] after its last token."""
    ids = torch.tensor([prompt], device=model.embedding.weight.device)
    *parts, last = ids.split(chunk, dim=1)
    for part in parts:
        model.logits(part, cache=cache, last_only=True, routing=routing)
    return model.logits(last, cache=cache, last_only=True, routing=routing)[0, 0]


def cache_for(model: LanguageModel, capacity: int, *, batch: int = 1, chunk: int = PREFILL_CHUNK) -> KVCache:
    """An empty cache of `batch` rows of up to `capacity` tokens: contiguous, but a ring that takes `chunk`
    tokens at a time for layers with a window shorter than that.
    """
    config, weight = model.config, model.embedding.weight
    sliding = [config.is_sliding(i) for i in range(config.layers)]
    window = config.window
    if window is None or window >= capacity:
        sliding = [False] * config.layers

    def made(is_ring: bool) -> KVCache:
        layers = sliding.count(is_ring)
        kv_heads, head_width, dtype, device = config.kv_heads, config.head_width, weight.dtype, weight.device
        if is_ring and window is not None:
            return RingKVCache(
                layers=layers,
                batch=batch,
                kv_heads=kv_heads,
                head_width=head_width,
                window=window,
                chunk=chunk,
                dtype=dtype,
                device=device,
            )
        return ContiguousKVCache(
            layers=layers,
            batch=batch,
            kv_heads=kv_heads,
            head_width=head_width,
            capacity=capacity,
            dtype=dtype,
            device=device,
        )

    kinds = sorted(set(sliding))
    return LayeredKVCache([made(kind) for kind in kinds], [kinds.index(kind) for kind in sliding])


def rows_are_finite(logits: Tensor) -> list[bool]:
    """Whether each row of logits [B, V] is of finite numbers alone."""
    # one pass and no temporaries: nothing that is not finite leaves a sum finite
    sums: list[float] = logits.sum(-1, dtype=torch.float32).tolist()
    if all(map(math.isfinite, sums)):
        return [True] * len(sums)
    return logits.isfinite().all(-1).tolist()


@torch.inference_mode()
def _tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    chooser: TokenChooser[ChosenT],
    room: int,
    stop_tokens: Collection[int],
    cache: KVCache | None,
    chunk: int,
    routing: Routing | None,
) -> Iterator[ChosenT]:
    if cache is None:
        cache = cache_for(model, len(prompt) + room - 1, chunk=chunk)
    logits = prefill(model, prompt, cache, chunk=chunk, routing=routing)
    runner = OneTokenRunner([*model.blocks])
    ids = torch.empty(1, 1, dtype=torch.int64, device=logits.device)
    for index in range(room):
        if not rows_are_finite(logits[None])[0]:
            raise FloatingPointError(f"language model: the logits of token {index} are not finite")
        chosen = chooser.choose(logits.float())
        yield chosen
        if chosen.token_id in stop_tokens or index + 1 == room:
            return
        ids.fill_(chosen.token_id)
        logits = model.logits(ids, cache=cache, last_only=True, routing=routing, runner=runner)[0, 0]
