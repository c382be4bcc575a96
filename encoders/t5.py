"""T5 and UMT5 text encoders, as transformers computes them.

Legend: B rows, L tokens, D width.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..core.copies import moved
from ..core.offload import StoredWeights
from ..core.saving import Held
from ..language.checkpoints import ModelSource
from ..language.padding import padded
from .base import EncodedText
from .folders import Architecture, load_prompt_tokenizer, load_text_model, model_source, text_architecture
from .origin import TextComponent, TextOrigin, required_origin
from .prompts import special_ids, token_rows, warnings_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, T5EncoderModel, UMT5EncoderModel

BYTES = "ByT5Tokenizer"
"""The class of tokenizers of bytes."""


@dataclass(frozen=True, kw_only=True)
class T5Encoder:
    """States after all blocks and the final norm of `prompt <end>`, at most `max_tokens` with the mark.

    `pad_to_max`: rows are `max_tokens` long, else as long as the longest. `masked`: pads are hidden from the encoder.
    `keeps_pads`: the states of pads are part of the result, `lengths` all L; else `lengths` count a row's own tokens
    and states past them are zero. None: they are kept where they were not hidden. FLUX.1 and SD3 pad, hide nothing and
    keep the pads; LTX-Video does too, but leaves the pads out afterwards; Wan pads and hides them.

    What does not fit is left out, and the words are named in the result's warnings. With `stored`, the model is on the
    meta device and each call reads its weights; `origin` is where it was loaded from.
    """

    model: "T5EncoderModel | UMT5EncoderModel"
    tokenizer: "PreTrainedTokenizerBase"
    max_tokens: int
    pad_to_max: bool
    masked: bool
    keeps_pads: bool | None = None
    stored: StoredWeights | None = None
    origin: TextOrigin | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 2")
        if not self.pad_to_max and (self._keeps_pads or not self.masked):
            raise ValueError(
                "pad_to_max is False, but the pads are attended or kept: a row would depend on its neighbours' lengths;"
                " set pad_to_max, or masked without keeps_pads"
            )
        special_ids(self.tokenizer, ("eos", "pad"), self.model.config.vocab_size)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str]) -> EncodedText:
        """States [B, L, D] of the prompts.

        Raises:
            ValueError: no prompts, or one that is not a string of whole characters.
        """
        if self.stored is not None:
            return self.resident()(prompts)
        rows, warnings = self.tokens(prompts)
        ids, lengths = self._padded(rows), torch.tensor([len(row) for row in rows], device=self.model.device)
        is_own = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]  # [B, L]
        model = cast(Any, self.model)
        states: Tensor = model(input_ids=ids, attention_mask=is_own.long() if self.masked else None).last_hidden_state
        if self._keeps_pads:
            return EncodedText(states=states, lengths=torch.full_like(lengths, ids.shape[1]), warnings=warnings)
        return EncodedText(
            states=states.masked_fill(~is_own[..., None], 0.0),
            lengths=lengths,
            warnings=warnings,
        )

    def with_max_tokens(self, max_tokens: int) -> "T5Encoder":
        """The same encoder, reading at most so many tokens with the mark."""
        return dataclasses.replace(self, max_tokens=max_tokens)

    def resident(self) -> "T5Encoder":
        """The same encoder with its weights in memory."""
        if self.stored is None:
            return self
        return dataclasses.replace(self, model=self.stored.resident(self.model), stored=None)

    def component(self) -> TextComponent:
        """See `SaveableEncoder`."""
        origin = required_origin(self, self.origin)
        kind = _known(origin.model)
        held = Held(
            module=self.model,
            key_map=kind.key_map(self.model),
            source=None if self.stored is None else self.stored.source,
            copies={name: other for pair in kind.renamed for name, other in (pair, pair[::-1])},
        )
        return origin.whole_component(self.tokenizer, held)

    def moved(self, device: torch.device, dtype: torch.dtype | None) -> "T5Encoder":
        """A copy elsewhere. In float16 the output of each feed-forward stays in float32, as when it is loaded."""
        model = moved(self.model, device, dtype)
        for name, weight in self.model.named_parameters() if dtype is torch.float16 else ():
            if name.endswith(".wo.weight"):
                wide = torch.nn.Parameter(moved(weight.detach(), device, torch.float32), requires_grad=False)
                model.get_submodule(name.removesuffix(".weight")).register_parameter("weight", wide)
        return dataclasses.replace(self, model=model, stored=moved(self.stored, device, dtype))

    def tokens(self, prompts: Sequence[str]) -> tuple[list[list[int]], tuple[str, ...]]:
        """Each prompt's ids with the end mark, and a warning for each one that was cut short."""
        rows, room = token_rows(self.tokenizer, prompts), self.max_tokens - 1
        (eos,) = special_ids(self.tokenizer, ("eos",), self.model.config.vocab_size)
        return [[*row.ids[:room], eos] for row in rows], warnings_of(rows, room, "T5")

    def places(self, prompts: Sequence[str]) -> list[list[int]]:
        """For each of a row's own tokens, where in the prompt it stands; -1 for the end mark."""
        rows = token_rows(self.tokenizer, prompts)
        return [[*row.places[: self.max_tokens - 1], -1] for row in rows]

    @property
    def _keeps_pads(self) -> bool:
        return not self.masked if self.keeps_pads is None else self.keeps_pads

    def _padded(self, rows: list[list[int]]) -> Tensor:
        (pad,) = special_ids(self.tokenizer, ("pad",), self.model.config.vocab_size)
        full = [row + [pad] * (self.max_tokens - len(row)) for row in rows] if self.pad_to_max else rows
        return padded(full, pad).to(self.model.device)


def load_t5(
    model: str | ModelSource,
    tokenizer_folder: str | Path,
    *,
    max_tokens: int,
    pad_to_max: bool,
    masked: bool,
    keeps_pads: bool | None = None,
    tokenizer_class: str = "T5Tokenizer",
    variant: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> T5Encoder:
    """The T5 or UMT5 encoder of a folder in transformers' layout or in a file by its names, and the tokenizer of
    another folder, of transformers' `tokenizer_class` (ByT5's has no file of words). In float16 the output of each
    feed-forward stays in float32, as in transformers: it overflows.

    Nothing is fetched from the network, and nothing printed. `variant` is the part of the weights' file names that
    tells copies apart ("fp16"). On the meta device, weights stay in the files, and each call reads them.

    Raises:
        FileNotFoundError: a folder, a config.json, the weights or the tokenizer's files are missing.
        ValueError: another architecture, weights that do not fit the config, a tokenizer that does not fit the model,
            a setting out of range.
    """
    source = model_source(model)
    module, stored = load_text_model(source, _known(source), variant=variant, device=device, dtype=dtype)
    files = ("tokenizer_config.json",) if tokenizer_class == BYTES else ("spiece.model",)
    tokenizer = load_prompt_tokenizer(Path(tokenizer_folder), tokenizer_class, (files,))
    return T5Encoder(
        model=module,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        pad_to_max=pad_to_max,
        masked=masked,
        keeps_pads=keeps_pads,
        stored=stored,
        origin=TextOrigin.of(source, tokenizer_folder, variant, tokenizer),
    )


def _known(source: ModelSource) -> Architecture:
    """Which of the two kinds a model is. Errors as for `text_architecture`."""
    return text_architecture(source, (_architecture("T5"), _architecture("UMT5")))


def _architecture(family: str) -> Architecture:
    """One embedding has two names in the module; files have it under either, or both. ComfyUI's hold the tokenizer
    too."""
    return Architecture(
        model=f"{family}EncoderModel",
        config=f"{family}Config",
        drops=("encoder.embed_tokens.weight", "spiece_model"),
        renamed=(("encoder.embed_tokens.weight", "shared.weight"),),
        wide=("wo",),
    )
