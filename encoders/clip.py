"""CLIP text encoders: OpenAI's CLIP-L and OpenCLIP's bigG, as transformers computes them.

Legend: B rows, N chunks, L tokens, D width, Dp width of the pooled vector.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from ..core.key_map import Layout, named_weights
from ..core.offload import StoredWeights
from ..core.saving import Held
from ..language.checkpoints import ModelSource, StoredModel
from .base import EncodedText
from .clip_keys import open_clip_layout
from .folders import Architecture, load_prompt_tokenizer, load_text_model, model_source, text_architecture
from .origin import TextComponent, TextOrigin, required_origin
from .prompts import TokenRow, special_ids, token_rows, warnings_of

if TYPE_CHECKING:
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, PreTrainedTokenizerBase

Pooled = Literal["pooler", "projection"]
LongPrompts = Literal["cut", "chunks"]
Projection = Literal["stored", "identity"]
PLAIN, PROJECTED = "CLIPTextModel", "CLIPTextModelWithProjection"


@dataclass(frozen=True, kw_only=True)
class ClipEncoder:
    """States of `<begin> prompt <end> <pad>...`, always `max_tokens` (77) long; pads are attended, so they count.

    `layer`: the states after that many blocks (0: the embeddings), through the final norm where `normed`. Stable
    Diffusion 1.5 and FLUX.1 read the last layer, normed; SDXL and SD3.5 the last but one, not normed.
    `pooled`: the normed state after all blocks at the end mark ("pooler"), that state through the text projection
    ("projection"), or none.
    `long_prompts`: a prompt that does not fit is "cut" and the words left out are named in the result's warnings, or
    read in "chunks": pieces of `max_tokens - 2` tokens, each with marks and pads of its own and encoded alone, their
    states one after the other; `pooled` is the first one's. A row's `lengths` then counts its own chunks, and up to
    there it is that prompt alone. Where its neighbours have more chunks, its states go on with those of an empty prompt
    instead of zeros, for denoisers that attend to every token. With `stored`, the model is on the meta device and each
    call reads its weights; `origin` is where it was loaded from.
    """

    model: "CLIPTextModel | CLIPTextModelWithProjection"
    tokenizer: "PreTrainedTokenizerBase"
    layer: int
    normed: bool
    pooled: Pooled | None
    long_prompts: LongPrompts = "cut"
    stored: StoredWeights | None = None
    origin: TextOrigin | None = None

    def __post_init__(self) -> None:
        layers = self.num_layers
        if not 0 <= self.layer <= layers:
            raise ValueError(f"layer is {self.layer}; the text encoder has layers 0 to {layers}")
        if self.pooled not in ("pooler", "projection", None):
            raise ValueError(f"pooled is {self.pooled!r}; it must be 'pooler', 'projection' or None")
        if self.pooled == "projection" and self._projection is None:
            raise ValueError(f"pooled is 'projection', but the text encoder has none; it must be a {PROJECTED}")
        if self.long_prompts not in ("cut", "chunks"):
            raise ValueError(f"long_prompts is {self.long_prompts!r}; it must be 'cut' or 'chunks'")
        if self.max_tokens < 3:
            raise ValueError(f"the tokenizer's model_max_length is {self.max_tokens}; it must be at least 3")
        special_ids(self.tokenizer, ("bos", "eos", "pad"), self.model.config.vocab_size)

    @property
    def max_tokens(self) -> int:
        """Tokens of a chunk with both marks: what the tokenizer says, at most the positions that the model has."""
        return min(self.tokenizer.model_max_length, self.model.config.max_position_embeddings)

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return self.model.config.num_hidden_layers

    def with_clip_skip(self, clip_skip: int) -> "ClipEncoder":
        """The same encoder read `clip_skip` layers earlier than this one (as diffusers counts: 0 changes nothing).

        Raises:
            ValueError: negative, or more layers than there are below this one's.
        """
        if not 0 <= clip_skip <= self.layer:
            raise ValueError(f"clip_skip is {clip_skip}; this text encoder can skip 0 to {self.layer} layers")
        return dataclasses.replace(self, layer=self.layer - clip_skip)

    def resident(self) -> "ClipEncoder":
        """The same encoder with its weights in memory."""
        if self.stored is None:
            return self
        return dataclasses.replace(self, model=self.stored.resident(self.model), stored=None)

    def component(self) -> TextComponent:
        """See `SaveableEncoder`."""
        origin = required_origin(self, self.origin)
        source = None if self.stored is None else self.stored.source
        held = Held(module=self.model, key_map=_architecture(origin.model).key_map(self.model), source=source)
        return origin.whole_component(self.tokenizer, held)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str]) -> EncodedText:
        """States [B, L, D], L `max_tokens` times the largest number of chunks, and pooled [B, Dp].

        Raises:
            ValueError: no prompts, or one that is not a string of whole characters.
        """
        if self.stored is not None:
            return self.resident()(prompts)
        chunks, warnings = self.tokens(prompts)
        counts, most = [len(row) for row in chunks], max(len(row) for row in chunks)
        ids = [chunk for row in chunks for chunk in row]
        if min(counts) < most:
            ids.append(self._chunk(()))
        starts = [sum(counts[:row]) for row in range(len(counts))]
        order = [
            [start + i if i < count else len(ids) - 1 for i in range(most)]
            for start, count in zip(starts, counts, strict=True)
        ]
        states, pooled = self._encode(torch.tensor(ids, device=self.model.device))
        return EncodedText(
            states=states[torch.tensor(order, device=states.device)].flatten(1, 2),
            lengths=self.max_tokens * torch.tensor(counts, device=states.device),
            warnings=warnings,
            pooled=None if pooled is None else pooled[torch.tensor(starts, device=states.device)],
        )

    def tokens(self, prompts: Sequence[str]) -> tuple[list[list[list[int]]], tuple[str, ...]]:
        """Each prompt's chunks of ids, with marks and pads, and a warning for each prompt that was cut short."""
        rows = token_rows(self.tokenizer, prompts)
        chunks = [[self._chunk(piece) for piece in self._pieces(row.ids)] for row in rows]
        return chunks, warnings_of(rows, self._room, "CLIP") if self.long_prompts == "cut" else ()

    def places(self, prompts: Sequence[str]) -> list[list[int]]:
        """For each token up to a row's length, where in the prompt it stands; -1 for marks and pads."""
        return [self._row_places(row) for row in token_rows(self.tokenizer, prompts)]

    def _row_places(self, row: TokenRow) -> list[int]:
        pieces = self._pieces(row.places)
        return [place for piece in pieces for place in (-1, *piece, *[-1] * (self.max_tokens - 1 - len(piece)))]

    def _pieces(self, items: tuple[int, ...]) -> list[tuple[int, ...]]:
        if self.long_prompts == "cut":
            return [items[: self._room]]
        return [items[start : start + self._room] for start in range(0, max(len(items), 1), self._room)]

    def _chunk(self, ids: tuple[int, ...]) -> list[int]:
        bos, eos, pad = special_ids(self.tokenizer, ("bos", "eos", "pad"), self.model.config.vocab_size)
        return [bos, *ids, eos, *[pad] * (self._room - len(ids))]

    @property
    def _room(self) -> int:
        return self.max_tokens - 2

    def _encode(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """States [N, L, D] and pooled [N, Dp] of ids [N, L]."""
        text, is_last = self._text, self.layer == self.num_layers
        # In transformers the last of `hidden_states` is not normed for CLIP, but for most other models it is.
        output: Any = text(input_ids=ids, output_hidden_states=not (is_last and self.normed))
        if is_last and self.normed:
            states = output.last_hidden_state
        else:
            states = output.hidden_states[self.layer]
            states = text.final_layer_norm(states) if self.normed else states
        if self.pooled is None:
            return states, None
        return states, self._projection(output.pooler_output) if self.pooled == "projection" else output.pooler_output

    @property
    def _text(self) -> Any:
        """The model without its projection."""
        return self.model if self._projection is None else cast(Any, self.model).text_model

    @property
    def _projection(self) -> Any:
        from transformers import CLIPTextModelWithProjection

        return self.model.text_projection if isinstance(self.model, CLIPTextModelWithProjection) else None


def load_clip(
    model: str | ModelSource,
    tokenizer_folder: str | Path,
    *,
    skipped: int = 0,
    normed: bool = True,
    pooled: Pooled | None = None,
    long_prompts: LongPrompts = "cut",
    projection: Projection = "stored",
    variant: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> ClipEncoder:
    """The CLIP text encoder of a folder in transformers' layout, or in a file by its or OpenCLIP's names, and the
    tokenizer of another, read `skipped` blocks before its last.

    Nothing is fetched from the network, and nothing printed. `variant` is the part of the weights' file names that
    tells copies apart ("fp16"). `projection` "identity" is for models that have none, but are read as if they had. On
    the meta device, weights stay in the files, and each call reads them.

    Raises:
        FileNotFoundError: a folder, a config.json, the weights or the tokenizer's files are missing.
        ValueError: another architecture, weights that do not fit the config, a tokenizer that does not fit the model,
            a setting out of range.
    """
    source = model_source(model)
    kind = _architecture(source, projection)
    module, stored = load_text_model(source, kind, variant=variant, device=device, dtype=dtype)
    tokenizer = load_prompt_tokenizer(Path(tokenizer_folder), "CLIPTokenizer", (("vocab.json", "merges.txt"),))
    layers = int(module.config.num_hidden_layers)
    if not 0 <= skipped <= layers:
        raise ValueError(f"skipped is {skipped}; the text encoder in {source} has {layers} layers")
    return ClipEncoder(
        model=module,
        tokenizer=tokenizer,
        layer=layers - skipped,
        normed=normed,
        pooled=pooled,
        long_prompts=long_prompts,
        stored=stored,
        origin=TextOrigin.of(source, tokenizer_folder, variant, tokenizer),
    )


def _architecture(source: ModelSource, projection: Projection = "stored") -> Architecture:
    """Files of `CLIPTextModel` have had a prefix in all their names until transformers dropped it. ComfyUI's have a
    projection where nothing reads one."""
    unread = ("text_projection.weight",) if isinstance(source, StoredModel) else ()
    plain = Architecture(
        model=PLAIN,
        config="CLIPTextConfig",
        prefixes=("", "text_model."),
        drops=("embeddings.position_ids", *unread),
        others=_open_clip,
    )
    projected = dataclasses.replace(
        plain,
        model=PROJECTED,
        prefixes=("",),
        drops=("text_model.embeddings.position_ids",),
    )
    if projection == "identity":
        projected = dataclasses.replace(projected, identities=("text_projection",), others=_none)
    return text_architecture(source, (plain, projected))


def _open_clip(module: nn.Module) -> tuple[Layout, ...]:
    weights = named_weights(module)
    projection = weights.get("text_projection.weight")
    return (
        open_clip_layout(
            "text_model." if any(name.startswith("text_model.") for name in weights) else "",
            blocks=sum(name.endswith(".layer_norm1.weight") for name in weights),
            projected=None if projection is None else len(projection),
        ),
    )


def _none(module: nn.Module) -> tuple[Layout, ...]:
    return ()
