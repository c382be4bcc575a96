"""Decoder language models of `language/`, read at chosen layers, as text encoders.

Legend: B rows, L tokens, D width, N layers that are read.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.attention.base import AttentionMask, AttentionSelector
from ..core.attention.registry import attention_selector
from ..core.offload import StoredWeights
from ..core.saving import Held
from ..language.checkpoints import ModelSource, head_copies, headless_key_map, load_headless_model, model_config
from ..language.model import LanguageModel, Layer
from ..language.padding import padded
from .base import EncodedText
from .folders import load_prompt_tokenizer, model_source
from .origin import TextComponent, TextOrigin, required_origin
from .prompts import SHOWN, TokenRow, checked_prompts, special_ids, token_rows
from .templates import Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DecoderEncoder", "Layer", "load_decoder_encoder", "row_states"]

_TOKENIZER_FILES = (("vocab.json", "merges.txt"), ("tokenizer.model",))


@dataclass(frozen=True, kw_only=True)
class DecoderEncoder:
    """States of each prompt written into `template`: those of several `layers` side by side, without the first `drop`
    tokens, which are the template's.

    Rows hold at most `max_tokens` after the drop. `pad_to_max`: they all do, pads are told apart by the language model
    alone, and their states are part of the result (`lengths` all L), as FLUX.2 reads them; else `lengths` count a row's
    own tokens and states past them are zero. Pads stand where the tokenizer puts them, before a text or after it; those
    before see nothing.

    What does not fit is left out, and the words are named in the result's warnings. With `stored`, the language model
    is on the meta device and each call reads its weights; `origin` is where it was loaded from.
    """

    language_model: LanguageModel
    tokenizer: "PreTrainedTokenizerBase"
    template: Template
    layers: tuple[Layer, ...]
    max_tokens: int
    drop: int = 0
    pad_to_max: bool = False
    stored: StoredWeights | None = None
    origin: TextOrigin | None = None

    def __post_init__(self) -> None:
        config = self.language_model.config
        if not self.layers or any(not 0 <= layer.index <= config.layers for layer in self.layers):
            raise ValueError(f"layers are {self.layers}; the language model has layers 0 to {config.layers}")
        if self.drop < 0:
            raise ValueError(f"drop is {self.drop}; it must be at least 0")
        most = config.context_length - self.drop
        if not 1 <= self.max_tokens <= most:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be from 1 to {most}")
        special_ids(self.tokenizer, ("pad",) if self.pad_to_max else (), config.vocab_size)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str]) -> EncodedText:
        """States [B, L, N D] of the prompts.

        Raises:
            ValueError: no prompts, or one that is not a string of whole characters.
        """
        if self.stored is not None:
            return self.resident()(prompts)
        rows, warnings = self.tokens(prompts)
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        states = self._padded(rows, lengths) if self.pad_to_max else self._alone(rows, lengths)
        kept = torch.full_like(lengths, states.shape[1]) if self.pad_to_max else lengths
        return EncodedText(states=states[:, self.drop :], lengths=kept - self.drop, warnings=warnings)

    def resident(self) -> "DecoderEncoder":
        """The same encoder with its weights in memory."""
        if self.stored is None:
            return self
        return dataclasses.replace(self, language_model=self.stored.resident(self.language_model), stored=None)

    def component(self) -> TextComponent:
        """See `SaveableEncoder`."""
        return self.component_beside(())

    def component_beside(self, others: tuple[Held, ...]) -> TextComponent:
        """The component of the same files with other modules that were made of them."""
        origin = required_origin(self, self.origin)
        held = Held(
            module=self.language_model,
            key_map=headless_key_map(origin.model, self.language_model.config.layers),
            source=None if self.stored is None else self.stored.source,
            copies=head_copies(origin.files(self.tokenizer)),
        )
        return origin.component(self.tokenizer, (held, *others))

    def with_max_tokens(self, max_tokens: int) -> "DecoderEncoder":
        """The same encoder, reading at most so many tokens after the drop."""
        return dataclasses.replace(self, max_tokens=max_tokens)

    def tokens(self, prompts: Sequence[str]) -> tuple[list[list[int]], tuple[str, ...]]:
        """Each prompt's ids in its template, and a warning for each prompt that was cut short.

        Raises:
            ValueError: as for a call, or a template that has no more than the tokens that are dropped.
        """
        prompts = checked_prompts(prompts)
        found = token_rows(self.tokenizer, [self.template(prompt, self.tokenizer) for prompt in prompts])
        for row in found:
            if len(row.ids) <= self.drop:
                raise ValueError(f"{row.text!r} has {len(row.ids)} tokens, of which the first {self.drop} are dropped")
        room = self.drop + self.max_tokens
        told = [self._left_out(prompt, row) for prompt, row in zip(prompts, found, strict=True) if len(row.ids) > room]
        return [list(row.ids[:room]) for row in found], tuple(dict.fromkeys(told))

    @property
    def _device(self) -> torch.device:
        return self.language_model.embedding.weight.device

    def _left_out(self, prompt: str, row: TokenRow) -> str:
        """What to tell of a prompt that is cut: its words that are not read, or else the template's."""
        start = row.spans[self.drop + self.max_tokens][0]
        end = row.text.rfind(prompt.strip()) + len(prompt.strip())
        rest = row.text[start:end] if start < end else row.text[start:]
        words = rest.strip() or rest
        shown = words if len(words) <= SHOWN else f"{words[:SHOWN]}..."
        count = len(row.ids) - self.drop
        return f"the prompt has {count} tokens in its template and {self.max_tokens} are read; left out: {shown!r}"

    def _read(self, ids: Tensor, mask: AttentionMask, positions: Tensor | None = None) -> Tensor:
        """States [B, L, N D] of `ids` [B, L]."""
        x = self.language_model.embed(ids.to(self._device))
        return torch.cat(self.language_model.read(x, self.layers, positions=positions, mask=mask), dim=-1)

    def _alone(self, rows: list[list[int]], lengths: Tensor) -> Tensor:
        x = self.language_model.embed(padded(rows).to(self._device))
        return row_states(self.language_model, self.layers, x, lengths)

    def _padded(self, rows: list[list[int]], lengths: Tensor) -> Tensor:
        """States of rows that are filled up, those of pads among them."""
        (pad,) = special_ids(self.tokenizer, ("pad",), self.language_model.config.vocab_size)
        width = self.drop + self.max_tokens
        if self.tokenizer.padding_side == "right":
            ids = padded([row + [pad] * (width - len(row)) for row in rows])
            return self._read(ids, AttentionMask(causal=True, key_lengths=lengths))
        return self._padded_before(rows, lengths, pad, width)

    def _padded_before(self, rows: list[list[int]], lengths: Tensor, pad: int, width: int) -> Tensor:
        """A pad before a text sees nothing, so that its states are the same everywhere: they are computed once."""
        places = torch.arange(max(map(len, rows)), device=lengths.device) + (width - lengths)[:, None]  # [B, longest]
        own = self._read(padded(rows), AttentionMask(causal=True), places[..., None])
        nothing = AttentionMask(key_lengths=torch.zeros(1, dtype=torch.int64, device=lengths.device))
        states = self._read(torch.tensor([[pad]]), nothing).repeat(len(rows), width, 1)
        for row, length in enumerate(map(len, rows)):
            states[row, width - length :] = own[row, :length]
        return states


def row_states(
    language_model: LanguageModel,
    layers: Sequence[Layer],
    x: Tensor,
    lengths: Tensor,
    positions: Tensor | None = None,
) -> Tensor:
    """States [B, L, N D] of rows of embedded tokens `x` [B, L, D] that are padded at the end, zero past each row's end.
    `positions` as in `LanguageModel.read`.
    """
    states = torch.cat(language_model.read(x, layers, positions=positions), dim=-1)
    is_own = torch.arange(states.shape[1], device=states.device) < lengths[:, None]  # [B, L]
    return states.masked_fill(~is_own[..., None], 0.0)


def load_decoder_encoder(
    model: str | ModelSource,
    tokenizer_folder: str | Path,
    *,
    template: Template,
    layers: tuple[Layer, ...],
    max_tokens: int,
    drop: int = 0,
    pad_to_max: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: AttentionSelector | None = None,
    variant: str | None = None,
) -> DecoderEncoder:
    """The encoder of a folder in transformers' layout or in a file by its names, and the tokenizer of another folder: a
    decoder that `language/` knows, alone or inside a model that also sees (Qwen2.5-VL, Mistral 3). The head, blocks
    after the last layer and the vision tower are not loaded.

    A negative layer counts from the end: -1 stands for all blocks. `variant` picks one of several copies of the
    weights. On the meta device, weights stay in the files, and each call reads them.

    Raises:
        FileNotFoundError: a folder, a config.json, the weights or the tokenizer's files are missing.
        ValueError: another architecture, weights that do not fit the config, a tokenizer that does not fit the model,
            a setting out of range.
    """
    source = model_source(model)
    num_states = model_config(source).layers + 1
    counted = tuple(
        Layer(each.index % num_states if -num_states <= each.index < 0 else each.index, each.normed) for each in layers
    )
    language_model, stored = load_headless_model(
        source,
        blocks=max((layer.index for layer in counted), default=0),
        device=device,
        dtype=dtype,
        attention=attention or attention_selector(),
        variant=variant,
    )
    tokenizer = load_prompt_tokenizer(Path(tokenizer_folder), "AutoTokenizer", _TOKENIZER_FILES)
    return DecoderEncoder(
        language_model=language_model,
        tokenizer=tokenizer,
        template=template,
        layers=counted,
        max_tokens=max_tokens,
        drop=drop,
        pad_to_max=pad_to_max,
        stored=stored,
        origin=TextOrigin.of(source, tokenizer_folder, variant, tokenizer),
    )
