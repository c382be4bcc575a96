"""A decoder language model, read at one layer, as a text encoder."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..language.model import LanguageModel
from ..language.padding import padded
from ..language.tokenizer import Tokenizer
from .base import EncodedText

SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class LanguageModelEncoder:
    """States after `layer` blocks (through the final norm where `normed`) of `<bos> prompt <eos>`, at most `max_tokens`
    with both marks.

    An empty prompt is `<bos><eos>`. What does not fit is left out, and the words are named in the result's warnings.
    """

    language_model: LanguageModel
    tokenizer: Tokenizer
    layer: int
    normed: bool
    max_tokens: int

    def __post_init__(self) -> None:
        layers, context = self.language_model.config.layers, self.language_model.config.context_length
        if not 0 <= self.layer <= layers:
            raise ValueError(f"layer is {self.layer}; the language model has layers 0 to {layers}")
        if not 3 <= self.max_tokens <= context:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be from 3 to the context length, {context}")

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str]) -> EncodedText:
        """States of the prompts [B, L, D], L that of the longest.

        Raises:
            ValueError: no prompts.
        """
        if not prompts:
            raise ValueError("no prompts to encode; give at least one (it may be empty)")
        rows, warnings = self.tokens(prompts)
        device = self.language_model.embedding.weight.device
        ids, lengths = padded(rows, self.tokenizer.special.pad), torch.tensor([len(row) for row in rows])
        states = self.language_model.hidden_states(
            ids.to(device), lengths.to(device), layer=self.layer, normed=self.normed
        )
        return EncodedText(states=states, lengths=lengths.to(device), warnings=warnings)

    def tokens(self, prompts: Sequence[str]) -> tuple[list[list[int]], tuple[str, ...]]:
        """Each prompt's ids with its marks, and a warning for each one that was cut short."""
        special, room = self.tokenizer.special, self.max_tokens - 2
        warnings: dict[str, None] = {}
        rows: list[list[int]] = []
        for prompt in prompts:
            ids = self.tokenizer.encode(prompt)
            if len(ids) > room:
                dropped = self.tokenizer.decode(ids[room:]).strip()
                warnings[
                    f"the prompt has {len(ids)} tokens and the model reads {room}; left out: {_beginning(dropped)!r}"
                ] = None
            rows.append([special.bos, *ids[:room], special.eos])
        return rows, tuple(warnings)


def _beginning(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
