"""What generation gives: text piece by piece, and the whole with its figures."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .chat import split_reasoning
from .detokenise import Detokeniser, StopMatcher
from .sampling import Choice, Sampling
from .tokenizer import TextTokenizer

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One token as it comes: its id, and the text it adds. That is empty for an end mark, inside a character, and while
    it may be the start of a stop string. `choice` has the log-probabilities, where they are asked for; `is_end`: the
    text ends here by itself.
    """

    token_id: int
    text: str
    choice: Choice
    is_end: bool = False


@dataclass(frozen=True, kw_only=True)
class GenerationTimings:
    """Prefill and decode apart: seconds from the call to the first token, in which the prompt's `num_prompt_tokens`
    were read, and tokens per second after it (None: no other token came). `kv_cache_bytes` is the size of the keys and
    values kept (of the whole batch, for several prompts).
    """

    first_token_seconds: float
    tokens_per_second: float | None
    num_prompt_tokens: int
    kv_cache_bytes: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What followed `prompt` (for messages: as the chat template wrote them).

    `text` is the answer alone and `reasoning` what stood in a leading <think> block, if there was one. It ended by
    "stop" (an end token, which is not among `token_ids`, or a stop string, which is not in `text`), by "length", or was
    "cancelled". `logprobs` are the log-probabilities per token, where asked for; `experts`, for models that have them,
    which were visited in each layer (None where several prompts ran together).
    """

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    timings: GenerationTimings
    reasoning: str | None = None
    logprobs: tuple[Choice, ...] | None = None
    experts: Mapping[int, tuple[int, ...]] | None = field(default=None, hash=False)


@dataclass(frozen=True, kw_only=True)
class Context:
    """A prompt made ready: its `text`, the `ids` that are read, those that the new text continues (`shown`), whether it
    is a chat, and whether it ends inside a block of reasoning.
    """

    text: str
    ids: tuple[int, ...]
    shown: tuple[int, ...] = ()
    is_chat: bool = False
    opens_reasoning: bool = False


class Assembler:
    """Puts one request's tokens together as they come, and says when they end."""

    def __init__(
        self, context: Context, sampling: Sampling, tokenizer: TextTokenizer, *, stop: Collection[int], room: int
    ) -> None:
        self._context, self._sampling, self._stop, self._room = context, sampling, stop, room
        self._detokeniser = Detokeniser(tokenizer, after=context.shown)
        self._matcher = StopMatcher(sampling.stop)
        self._pieces: list[Piece] = []
        self._started = self._first = self._latest = time.perf_counter()
        self.finish_reason: FinishReason | None = None

    def add(self, choice: Choice, *, is_complete: bool = False) -> Piece:
        """The piece of the next token; `is_complete`: nothing may follow it. With the last one, `finish_reason` is
        set.
        """
        self._latest = time.perf_counter()
        self._first = self._first if self._pieces else self._latest
        is_mark = choice.token_id in self._stop
        text = "" if is_mark else self._matcher.add(self._detokeniser.add(choice.token_id))
        if is_mark or self._matcher.matched is not None or is_complete:
            self.finish_reason = "stop"
        elif len(self._pieces) + 1 >= self._room:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._matcher.add(self._detokeniser.finish())
            if self._matcher.matched is not None:
                self.finish_reason = "stop"
            text += self._matcher.finish()
        is_end = self.finish_reason == "stop"
        self._pieces.append(Piece(token_id=choice.token_id, text=text, choice=choice, is_end=is_end))
        return self._pieces[-1]

    def completion(self, *, kv_cache_bytes: int, experts: Mapping[int, tuple[int, ...]] | None = None) -> Completion:
        """Everything so far; "cancelled" where the last piece has not come."""
        text, held = "".join(piece.text for piece in self._pieces), ""
        if self.finish_reason is None:
            held = self._matcher.add(self._detokeniser.finish()) + self._matcher.finish()
        reasoning, answer = None, text + held
        if self._context.is_chat:
            reasoning, answer = split_reasoning(answer, opened=self._context.opens_reasoning)
        kept = self._pieces[: -1 if self._pieces and self._pieces[-1].token_id in self._stop else None]
        wanted = self._sampling.logprobs is not None
        return Completion(
            prompt=self._context.text,
            text=answer,
            token_ids=tuple(piece.token_id for piece in kept),
            finish_reason=self.finish_reason or "cancelled",
            timings=self._timings(kv_cache_bytes),
            reasoning=reasoning,
            logprobs=tuple(piece.choice for piece in kept) if wanted else None,
            experts=experts,
        )

    def _timings(self, kv_cache_bytes: int) -> GenerationTimings:
        seconds, count = self._latest - self._first, len(self._pieces) - 1
        return GenerationTimings(
            first_token_seconds=self._first - self._started,
            tokens_per_second=count / seconds if count > 0 and seconds > 0 else None,
            num_prompt_tokens=len(self._context.ids),
            kv_cache_bytes=kv_cache_bytes,
        )
