"""Qwen2.5-VL's vision tower: pictures to tokens that the language model reads among its own (Bai et al. 2025).

Legend: K pictures, N patches of all pictures, P numbers of a patch, M tokens of all pictures (each of merge x merge
patches), D width, R rows of patches that see each other, L patches of the longest row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.attention.base import AttentionMask, AttentionSelector
from ..core.blocks.decoder import DecoderBlock, DecoderConfig
from ..core.key_map import KeyMap, Reshape, Rule
from ..core.key_rules import Layout
from ..core.loading import build_on_meta
from ..core.mlp import Activation
from ..core.norms import RMSNorm
from ..core.offload import StoredWeights, filled
from ..core.ops.row_product import Linear
from ..core.rotary import RotaryConfig, grid_positions, rotary_table
from ..core.stream import BlockInputs, NoCache, Stream
from ..language.checkpoints import ModelSource, model_weights, read_entries
from ..language.families.base import Entries
from ..language.families.rotary import read_rotary

_CHANNELS = 3

Grid = tuple[int, int]
"""Rows and columns of patches in a picture, multiples of `merge`."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Sizes of the tower. A patch is `patch` pixels a side and `frames` frames deep. Patches see their window,
    `window` tokens a side, but in the blocks `full`, where they see their whole picture.
    """

    layers: int
    width: int
    heads: int
    hidden: int
    out_width: int
    patch: int
    frames: int
    merge: int
    window: int
    full: frozenset[int]
    rope_theta: float = 10000.0
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width // self.heads % 4:
            raise ValueError(
                f"{self.heads} heads cannot share a width of {self.width} in fours, as the rotary pairs need"
            )
        if self.window < 1:
            raise ValueError("the windows of the vision tower are smaller than a token")

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "VisionConfig":
        """From the entries of a `Qwen2_5_VLConfig`.

        Raises:
            ValueError: an entry is missing, or makes no sense.
        """
        found: object = entries.get("vision_config")
        if not isinstance(found, Mapping):
            raise ValueError(f"the config's vision_config is {found!r}; it must be an object")
        given = Entries(cast(Mapping[str, Any], found))
        patch, merge = given.size("patch_size", 14), given.size("spatial_merge_size", 2)
        theta, scaling = read_rotary({**given.values, "rope_parameters": _plain(given)}, theta=10000.0, context=1)
        if scaling is not None or given.size("in_channels", _CHANNELS) != _CHANNELS:
            raise ValueError(
                "the config's vision_config scales its rotary embedding or reads other channels than three"
            )
        return cls(
            layers=given.size("depth", 32),
            width=given.size("hidden_size"),
            heads=given.size("num_heads", 16),
            hidden=given.size("intermediate_size", 3420),
            out_width=given.size("out_hidden_size", 3584),
            patch=patch,
            frames=given.size("temporal_patch_size", 2),
            merge=merge,
            window=given.size("window_size", 112) // merge // patch,
            full=_indices(given.values.get("fullatt_block_indexes", (7, 15, 23, 31))),
            rope_theta=theta,
            activation=given.activation("hidden_act", "silu"),
        )

    @property
    def block(self) -> DecoderConfig:
        """The sizes of each block."""
        return DecoderConfig(
            width=self.width,
            heads=self.heads,
            kv_heads=self.heads,
            head_width=self.width // self.heads,
            hidden=self.hidden,
            qkv_bias=True,
            bias=True,
            activation=self.activation,
        )

    @property
    def rotary(self) -> RotaryConfig:
        """The rotary embedding over rows and columns."""
        half = self.width // self.heads // 2
        return RotaryConfig(axes=(half, half), theta=self.rope_theta, pairing="half")


class VisionTower(nn.Module):
    """Patches through blocks, then each merge x merge patches to one token."""

    def __init__(self, config: VisionConfig, *, attention: AttentionSelector) -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.patch = Linear(_CHANNELS * config.frames * config.patch**2, config.width, bias=False)
        self.blocks = nn.ModuleList(DecoderBlock(config.block) for _ in range(config.layers))
        self.merger = Merger(config)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Tokens [M, D out] of `patches` [N, P], picture after picture as `grids` says; those of a token follow each
        other. Row-major, and each picture's are what they are without the others.
        """
        config, device = self.config, patches.device
        windows = _windows(grids, config)
        order = torch.cat(windows).to(device)  # [M]
        positions = torch.cat([_positions(grid, config.merge) for grid in grids]).to(device)  # [N, 2]
        positions = self._reordered(positions, order)
        by_window = _Rows.of([len(window) * config.merge**2 for window in windows], device)
        by_picture = _Rows.of([rows * columns for rows, columns in grids], device)
        x = self._reordered(self.patch(patches), order)
        for is_full, blocks in groupby(range(config.layers), key=lambda i: i in config.full):
            x = self._through(list(blocks), x, positions, by_picture if is_full else by_window)
        tokens = self.merger(x)
        return torch.empty_like(tokens).index_copy_(0, order, tokens)

    def _reordered(self, x: Tensor, order: Tensor) -> Tensor:
        """Patches [N, ...] with their tokens in another order [M]."""
        return x.unflatten(0, (len(order), -1))[order].flatten(0, 1)

    def _through(self, blocks: list[int], x: Tensor, positions: Tensor, rows: "_Rows") -> Tensor:
        """Patches [N, D] after blocks in which they see their row."""
        prepared = BlockInputs(
            rotary=rotary_table(self.config.rotary, rows.padded(positions)), mask=rows.mask, attention=self.attention
        )
        stream = Stream(x=rows.padded(x))
        for i in blocks:
            stream = self.blocks[i](stream, prepared, NoCache(), i)
        return stream.x[rows.is_own]


class Merger(nn.Module):
    """down(gelu(up(the normed patches of a token, side by side)))."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.width)
        self.width = config.width * config.merge**2
        self.up = Linear(self.width, self.width)
        self.down = Linear(self.width, config.out_width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] to [M, D out]."""
        return self.down(functional.gelu(self.up(self.norm(x).view(-1, self.width))))


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Patches that see each other, as rows: where the N patches are in them, [R, L], and what each patch sees."""

    is_own: Tensor
    mask: AttentionMask

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "_Rows":
        """Rows of so many patches each, one after the other."""
        counts = torch.tensor(lengths, device=device)
        is_own = torch.arange(max(lengths), device=device) < counts[:, None]
        return cls(is_own=is_own, mask=AttentionMask(key_lengths=None if len({*lengths}) == 1 else counts))

    def padded(self, x: Tensor) -> Tensor:
        """[N, ...] to [R, L, ...], zero past the ends."""
        rows = x.new_zeros((*self.is_own.shape, *x.shape[1:]))
        rows[self.is_own] = x
        return rows


def load_vision_tower(
    source: ModelSource,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    attention: AttentionSelector,
    variant: str | None = None,
) -> tuple[VisionTower, StoredWeights | None]:
    """The tower of a Qwen2.5-VL folder, or of one in a file; on the meta device, with where its weights lie.

    Raises:
        FileNotFoundError: a file or a shard is missing. ValueError: weights that do not fit the config.
    """
    config = VisionConfig.from_entries(read_entries(source))
    tower = build_on_meta(lambda: VisionTower(config, attention=attention))
    stored = filled(tower, model_weights(source, variant), vision_key_map(), dtype=dtype, device=device)
    return tower.requires_grad_(False).eval(), stored


def vision_key_map() -> KeyMap:
    """The tower's names inside the whole model, whose others are left out."""
    rules = (
        Rule("patch_embed.proj.weight", "patch.weight", (Reshape((0, -1)),)),
        Rule("blocks.{i}.norm1.weight", "blocks.{i}.attention_norm.weight"),
        Rule("blocks.{i}.attn.qkv.{leaf}", "blocks.{i}.attention.qkv.{leaf}"),
        Rule("blocks.{i}.attn.proj.{leaf}", "blocks.{i}.attention.output.{leaf}"),
        Rule("blocks.{i}.norm2.weight", "blocks.{i}.mlp_norm.weight"),
        Rule(("blocks.{i}.mlp.gate_proj.{leaf}", "blocks.{i}.mlp.up_proj.{leaf}"), "blocks.{i}.mlp.gate_up.{leaf}"),
        Rule("blocks.{i}.mlp.down_proj.{leaf}", "blocks.{i}.mlp.down.{leaf}"),
        Rule("merger.ln_q.weight", "merger.norm.weight"),
        Rule("merger.mlp.0.{leaf}", "merger.up.{leaf}"),
        Rule("merger.mlp.2.{leaf}", "merger.down.{leaf}"),
    )
    text = ("embed_tokens.weight", "norm.weight", "layers.{any*}")
    drops = ("lm_head.weight", "model.language_model.{any*}", *(f"model.{name}" for name in text))
    return KeyMap((Layout("transformers", rules, drops, ("visual.", "model.visual.")),))


def _windows(grids: Sequence[Grid], config: VisionConfig) -> list[Tensor]:
    """The tokens of each window, by their place among all."""
    windows: list[Tensor] = []
    start, side = 0, config.window
    for rows, columns in grids:
        height, width = rows // config.merge, columns // config.merge
        places = start + torch.arange(height * width).view(height, width)
        corners = ((top, left) for top in range(0, height, side) for left in range(0, width, side))
        windows += [places[top : top + side, left : left + side].flatten() for top, left in corners]
        start += height * width
    return windows


def _positions(grid: Grid, merge: int) -> Tensor:
    """Row and column of each patch of a picture [N, 2], token by token."""
    places = grid_positions(grid).view(grid[0] // merge, merge, grid[1] // merge, merge, 2)
    return places.transpose(1, 2).reshape(-1, 2)


def _plain(given: Entries) -> dict[str, Any]:
    """The rotary parameters without the name of their kind, which newer files write out."""
    found: object = given.values.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"the config's rope_parameters are {found!r}; they must be an object")
    plain = dict(cast(Mapping[str, Any], found))
    return {name: value for name, value in plain.items() if (name, value) != ("rope_type", "axial")}


def _indices(given: object) -> frozenset[int]:
    numbers = cast(Sequence[object], given) if isinstance(given, Sequence) else ()
    if any(type(each) is not int for each in numbers) or isinstance(given, str):
        raise ValueError(f"the config's fullatt_block_indexes are {given!r}; they must be whole numbers")
    return frozenset(cast(Sequence[int], numbers))
