"""Prompts with pictures, read by Qwen2.5-VL, as Qwen-Image-Edit and Qwen-Image-Edit-Plus are told them.

Legend: B rows, L tokens, D width, M tokens of a picture, H W pixels.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..core.attention.base import AttentionSelector
from ..core.attention.registry import attention_selector
from ..core.json_file import json_object
from ..core.offload import StoredWeights
from ..core.rotary import grid_positions
from ..core.saving import Held
from ..language.checkpoints import ModelSource, model_config, read_entries
from ..language.model import LanguageModel, Layer
from ..language.padding import padded
from .base import EncodedText
from .decoder import DecoderEncoder, load_decoder_encoder, row_states
from .folders import model_source
from .origin import TextComponent, TextOrigin
from .prompts import checked_prompts
from .qwen_vl_pictures import PicturePatches, PictureReader
from .qwen_vl_vision import Grid, VisionTower, load_vision_tower, vision_key_map
from .templates import QWEN_IMAGE_EDIT, QWEN_IMAGE_EDIT_DROP, Template

Positions = Literal["axes", "diffusers"]

NUMBERED = "Picture {}: "
_MARK = "<|image_pad|>"
_SETTINGS = "preprocessor_config.json"


@dataclass(frozen=True, kw_only=True)
class VisionLanguageEncoder:
    """States of prompts as `text` reads them, each after its own pictures, which `vision` turns into tokens. `heading`
    stands before each picture; a `{}` in it is the picture's number, from 1.

    `positions`: a picture's tokens stand at a time, a row and a column ("axes"), as the model was trained, or one after
    the other like words ("diffusers"), as diffusers 0.42 gives them to transformers 5. With `stored`, the vision tower
    is on the meta device and each call reads its weights.
    """

    text: DecoderEncoder
    vision: VisionTower
    reader: PictureReader
    heading: str = NUMBERED
    positions: Positions = "axes"
    stored: StoredWeights | None = None

    def __post_init__(self) -> None:
        seen, read, reader = self.vision.config, self.text.language_model.config, self.reader
        if seen.out_width != read.width or len(read.rope_sections) != 3:
            raise ValueError(f"the vision tower's tokens are {seen.out_width} wide; they do not fit the language model")
        if (seen.patch, seen.merge, seen.frames) != (reader.patch, reader.merge, reader.frames):
            raise ValueError(f"{reader} does not cut pictures as the vision tower, {seen}, reads them")
        if self.text.pad_to_max:
            raise ValueError("text pads its rows to their full length; prompts with pictures are read without pads")
        if self.positions not in ("axes", "diffusers"):
            raise ValueError(f"positions is {self.positions!r}; it must be 'axes' or 'diffusers'")

    @property
    def language_model(self) -> LanguageModel:
        """The language model itself."""
        return self.text.language_model

    def resident(self) -> "VisionLanguageEncoder":
        """The same encoder with its weights in memory."""
        vision = self.vision if self.stored is None else self.stored.resident(self.vision)
        return dataclasses.replace(self, text=self.text.resident(), vision=vision, stored=None)

    @property
    def origin(self) -> TextOrigin | None:
        """What it was loaded from."""
        return self.text.origin

    def component(self) -> TextComponent:
        """See `SaveableEncoder`."""
        source = None if self.stored is None else self.stored.source
        return self.text.component_beside((Held(module=self.vision, key_map=vision_key_map(), source=source),))

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], pictures: Sequence[Sequence[Tensor]] | None = None) -> EncodedText:
        """States [B, L, D] of prompts and their `pictures`: for each prompt any number, [3, H, W] in 0..1 of any sizes.

        Raises:
            ValueError: no prompts, one that is not a string of whole characters or holds the mark of a picture, another
                number of lists of pictures, something else than a picture, or more pictures than can be read.
        """
        lists = _lists(prompts, pictures)
        cut = self._cut(lists)
        grids = self._grids(lists, cut)
        rows, warnings = self._rows(prompts, grids)
        if self.stored is not None or self.text.stored is not None:
            return self.resident()._encoded(rows, lists, cut, grids, warnings)
        return self._encoded(rows, lists, cut, grids, warnings)

    def tokens(
        self, prompts: Sequence[str], pictures: Sequence[Sequence[Tensor]] | None = None
    ) -> tuple[list[list[int]], tuple[str, ...]]:
        """Each prompt's ids after those of its pictures, and a warning for each prompt that was cut short. Errors as
        for a call."""
        lists = _lists(prompts, pictures)
        return self._rows(prompts, self._grids(lists, self._cut(lists)))

    def _cut(self, lists: Sequence[Sequence[Tensor]]) -> dict[int, PicturePatches]:
        """Every picture, once."""
        return {id(picture): self.reader(picture) for row in lists for picture in row}

    def _grids(self, lists: Sequence[Sequence[Tensor]], cut: Mapping[int, PicturePatches]) -> list[list[Grid]]:
        """Rows and columns of each picture's tokens."""
        return [[self._tokens_of(cut[id(picture)].grid) for picture in row] for row in lists]

    def _rows(self, prompts: Sequence[str], grids: Sequence[Sequence[Grid]]) -> tuple[list[list[int]], tuple[str, ...]]:
        rows, warnings = self.text.tokens(_written(checked_prompts(prompts), grids, self.heading))
        mark = self._mark
        for row, row_grids in zip(rows, grids, strict=True):
            if row.count(mark) != sum(height * width for height, width in row_grids):
                raise ValueError(
                    f"{len(row_grids)} pictures do not fit in the {self.text.max_tokens} tokens that are read"
                )
        return rows, warnings

    def _encoded(
        self,
        rows: list[list[int]],
        lists: Sequence[Sequence[Tensor]],
        cut: Mapping[int, PicturePatches],
        grids: Sequence[Sequence[Grid]],
        warnings: tuple[str, ...],
    ) -> EncodedText:
        model, drop = self.language_model, self.text.drop
        device = model.embedding.weight.device
        ids, lengths = padded(rows, -1).to(device), torch.tensor([len(row) for row in rows], device=device)
        x = model.embed(ids.clamp(min=0))
        seen = self._seen(cut)
        for row, pictures in enumerate(lists):
            if pictures:
                x[row, ids[row] == self._mark] = torch.cat([seen[id(picture)] for picture in pictures]).to(x.dtype)
        positions = None
        if self.positions == "axes":
            places = [axes_positions(row, self._mark, each) for row, each in zip(rows, grids, strict=True)]
            positions = pad_sequence(places, batch_first=True)
        states = row_states(model, self.text.layers, x, lengths, positions)
        return EncodedText(states=states[:, drop:], lengths=lengths - drop, warnings=warnings)

    @property
    def _mark(self) -> int:
        return cast(int, cast(Any, self.text.tokenizer).convert_tokens_to_ids(_MARK))

    def _tokens_of(self, grid: Grid) -> Grid:
        """Rows and columns of a picture's tokens."""
        return grid[0] // self.reader.merge, grid[1] // self.reader.merge

    def _seen(self, cut: Mapping[int, PicturePatches]) -> dict[int, Tensor]:
        """The tokens [M, D] of each picture; one that several prompts share is looked at once."""
        if not cut:
            return {}
        weight, pictures = self.vision.patch.weight, list(cut.values())
        patches = torch.cat([picture.patches for picture in pictures]).to(weight.device, weight.dtype)
        tokens = self.vision(patches, [picture.grid for picture in pictures])
        counts = [len(picture.patches) // self.reader.merge**2 for picture in pictures]
        return dict(zip(cut, tokens.split(counts), strict=True))


def axes_positions(row: Sequence[int], mark: int, grids: Sequence[Grid]) -> Tensor:
    """Time, row and column [L, 3] of the tokens of a row in which pictures, whose tokens are `mark`, stand in `grids`.

    Words count up on all three axes; a picture is one moment, and the words after it go on from its longer side.
    """
    found: list[Tensor] = []
    start, left = 0, iter(grids)
    for is_picture, run in groupby(row, key=lambda token: token == mark):
        if is_picture:
            height, width = next(left)
            found.append(start + grid_positions((1, height, width)))
            start += max(height, width)
        else:
            length = len(list(run))
            found.append(torch.arange(start, start + length)[:, None].expand(-1, 3))
            start += length
    return torch.cat(found)


def load_vision_language_encoder(
    model: str | ModelSource,
    processor_folder: str | Path,
    *,
    template: Template = QWEN_IMAGE_EDIT,
    layers: tuple[Layer, ...] = (Layer(-1, True),),
    max_tokens: int | None = None,
    drop: int = QWEN_IMAGE_EDIT_DROP,
    heading: str = NUMBERED,
    positions: Positions = "axes",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: AttentionSelector | None = None,
    variant: str | None = None,
) -> VisionLanguageEncoder:
    """The encoder of a Qwen2.5-VL folder, or of one in a file, and of a folder with its tokenizer and
    preprocessor_config.json, both in transformers' layout. `max_tokens` None reads as many as the model can. Further
    settings and errors as for `load_decoder_encoder`.
    """
    source, processor_folder = model_source(model), Path(processor_folder)
    settings = processor_folder / _SETTINGS
    if not settings.is_file():
        raise FileNotFoundError(f"{settings}: no such file; it says how pictures are read")
    attention = attention or attention_selector()
    vision, stored = load_vision_tower(source, device=device, dtype=dtype, attention=attention, variant=variant)
    text = load_decoder_encoder(
        source,
        processor_folder,
        template=template,
        layers=layers,
        max_tokens=model_config(source).context_length - drop if max_tokens is None else max_tokens,
        drop=drop,
        device=device,
        dtype=dtype,
        attention=attention,
        variant=variant,
    )
    wanted: object = read_entries(source).get("image_token_id", 151655)
    if cast(Any, text.tokenizer).convert_tokens_to_ids(_MARK) != wanted:
        raise ValueError(f"{_MARK} is not the token {wanted!r} in {processor_folder}, as the model's config says")
    reader = PictureReader.from_entries(json_object(settings))
    return VisionLanguageEncoder(
        text=text, vision=vision, reader=reader, heading=heading, positions=positions, stored=stored
    )


def _lists(prompts: Sequence[str], pictures: Sequence[Sequence[Tensor]] | None) -> list[tuple[Tensor, ...]]:
    """The pictures of each prompt. ValueError where there is another number of lists."""
    lists: list[tuple[Tensor, ...]] = [()] * len(prompts) if pictures is None else [tuple(each) for each in pictures]
    if len(lists) != len(prompts):
        raise ValueError(f"{len(lists)} lists of pictures for {len(prompts)} prompts; there must be one for each")
    return lists


def _written(prompts: Sequence[str], grids: Sequence[Sequence[Grid]], heading: str) -> list[str]:
    """The prompts after their pictures, each of as many marks as it has tokens."""
    for prompt in prompts:
        if _MARK in prompt:
            raise ValueError(f"the prompt {prompt!r} holds {_MARK}, which stands for a picture")
    pictures = [
        "".join(
            f"{heading.replace('{}', str(i))}<|vision_start|>{_MARK * (height * width)}<|vision_end|>"
            for i, (height, width) in enumerate(row, 1)
        )
        for row in grids
    ]
    return [before + prompt for before, prompt in zip(pictures, prompts, strict=True)]
