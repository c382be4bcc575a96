"""A language model with its tokenizer: text in, text out."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Unpack

from .generate import Sampling, SamplingOptions, generate_ids, sampling_from
from .model import LanguageModel
from .tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One token as it comes: its id, and the text it adds (empty for the end mark, and inside a character)."""

    token_id: int
    text: str


@dataclass(frozen=True, kw_only=True)
class GenerationTimings:
    """Seconds to the first token (the prompt's pass), and tokens per second after it (None: no other token came)."""

    first_token_seconds: float
    tokens_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What followed `prompt`: `text` alone, its ids, and why it ended: "stop" (at the model's end mark, which is not
    among the ids) or "length".
    """

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    timings: GenerationTimings


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """Generates text. Options are those of `Sampling`: max_tokens, temperature (0: the likeliest token), top_k, top_p,
    seed.
    """

    language_model: LanguageModel
    tokenizer: Tokenizer

    def generate(self, prompt: str, **options: Unpack[SamplingOptions]) -> Completion:
        """Continue `prompt`.

        Raises:
            ValueError: an option out of range, or a prompt longer than the context.
        """
        return self._collect(prompt, self._continuation(prompt), sampling_from(options))

    def stream(self, prompt: str, **options: Unpack[SamplingOptions]) -> Iterator[Piece]:
        """Continue `prompt`; the pieces' texts join to `generate`'s text. Bad arguments are refused here, not at the
        first piece.
        """
        return self._pieces(self._continuation(prompt), sampling_from(options))

    def complete(self, prompt: str, **options: Unpack[SamplingOptions]) -> str:
        """`prompt` and its continuation, as one text."""
        return prompt.rstrip() + self.generate(prompt, **options).text

    def expand(self, prompt: str, **options: Unpack[SamplingOptions]) -> Completion:
        """A fuller description of what a short prompt names.

        Raises:
            ValueError: the model has no token for this, or as for `generate`.
        """
        return self._collect(prompt, self._expansion(prompt), sampling_from(options))

    def _continuation(self, prompt: str) -> "_Context":
        ids = self.tokenizer.encode(prompt)
        return self._checked(_Context(ids=(self.tokenizer.special.bos, *ids), shown=tuple(ids)))

    def _expansion(self, prompt: str) -> "_Context":
        special = self.tokenizer.special
        if special.expand is None:
            raise ValueError(
                "this language model has no <expand> token: it continues prompts, but does not expand them"
            )
        return self._checked(_Context(ids=(special.bos, *self.tokenizer.encode(prompt), special.expand), shown=()))

    def _checked(self, context: "_Context") -> "_Context":
        held, room = len(context.ids), self.language_model.config.context_length
        if held >= room:
            limit = f"at most {room - 1} leave room in the context of {room}"
            raise ValueError(f"the prompt has {held} tokens with its marks; {limit}")
        return context

    def _collect(self, prompt: str, context: "_Context", sampling: Sampling) -> Completion:
        started = first = time.perf_counter()
        pieces: list[Piece] = []
        for piece in self._pieces(context, sampling):
            first = first if pieces else time.perf_counter()
            pieces.append(piece)
        rest = time.perf_counter() - first
        stopped = pieces[-1].token_id == self.tokenizer.special.eos
        kept = pieces[:-1] if stopped else pieces
        rate = (len(pieces) - 1) / rest if len(pieces) > 1 else None
        return Completion(
            prompt=prompt,
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(piece.token_id for piece in kept),
            finish_reason="stop" if stopped else "length",
            timings=GenerationTimings(first_token_seconds=first - started, tokens_per_second=rate),
        )

    def _pieces(self, context: "_Context", sampling: Sampling) -> Iterator[Piece]:
        special = self.tokenizer.special
        banned = [token for token in (special.pad, special.bos, special.expand) if token is not None]
        shown = list(context.shown)
        text = self._text(shown)
        for token in generate_ids(self.language_model, context.ids, sampling, stop=(special.eos,), banned=banned):
            shown.append(token)
            longer = self._text(shown)
            yield Piece(token_id=token, text=longer[len(text) :])
            text = longer

    def _text(self, ids: Sequence[int]) -> str:
        """The text of ids, without a last character that is unfinished."""
        return self.tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")


@dataclass(frozen=True, kw_only=True)
class _Context:
    """What the model reads first, and the part of it that the new text continues."""

    ids: tuple[int, ...]
    shown: tuple[int, ...]
