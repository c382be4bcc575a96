"""Stable Diffusion 3 and 3.5 (medium, large): joint two-stream blocks over picture and text tokens, the last of which
leaves the text alone.

Flow matching: the network gives the slope dx/dsigma = noise - data. Where a token stands is added to it: a table for a
square larger than any picture, from whose middle the picture's part is taken. That table and all modulations (33 % of
SD3.5 large) depend on size, time and pooled text alone, so they are read by `prepare` and never by a step.

Source: diffusers' SD3Transformer2DModel and Stability AI's sd3.5 repository.

Legend: B rows, E evaluations, C latent channels, h w latent cells, P = 2 cells per token side, N = h w / P^2 picture
tokens, G tokens a side of the table of positions, Lt text tokens, Dt text width, Dp pooled width, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.attention.base import FULL, AttentionSelector
from ..core.blocks.joint import JointBlock, JointConfig
from ..core.blocks.joint_variants import DualJointBlock, LastJointBlock
from ..core.modulation import Modulation, ShiftScale
from ..core.norms import LayerNorm
from ..core.saving import Component
from ..core.stream import BlockInputs, NoCache, Runner, Stream, run_blocks
from ..schedulers.base import Point
from .base import Conditioning
from .embedding import SINUSOID_WIDTH, TIME_SCALE, Embedder, sinusoid
from .entries import FILE, size
from .fitting import check_cells, check_guidance, check_pooled, check_states, check_unpadded
from .hoisting import HoistingModule, gated, ungated
from .patches import patchify, unpatchify
from .saving import in_diffusers_layout
from .shapes import Marks, Shapes

PATCH = 2
NORM_EPS = 1e-6
HEAD_WIDTH = 64  # of every model without norms of queries and keys, from whose shapes it cannot be told
MARKS = Marks(
    (
        (
            "x_embedder.proj.weight",
            "context_embedder.weight",
            "y_embedder.mlp.0.weight",
            "joint_blocks.0.x_block.attn.qkv.weight",
        ),
        (
            "pos_embed.proj.weight",
            "context_embedder.weight",
            "time_text_embed.text_embedder.linear_1.weight",
            "transformer_blocks.0.norm1_context.linear.weight",
        ),
    )
)


@dataclass(frozen=True, kw_only=True)
class SD3Config:
    """Sizes. `grid` is G; `dual_layers` are the blocks with a second attention (SD3.5 medium's first 13);
    `sample_cells` are the cells a side of the pictures that the model was made for."""

    latent_channels: int = 16
    layers: int = 18
    heads: int = 18
    head_width: int = 64
    text_width: int = 4096
    pooled_width: int = 2048
    grid: int = 96
    qk_norm: bool = False
    dual_layers: tuple[int, ...] = ()
    sample_cells: int = 128

    @property
    def width(self) -> int:
        """D."""
        return self.heads * self.head_width

    def block(self) -> JointConfig:
        """The blocks' config."""
        return JointConfig(
            heads=self.heads, head_width=self.head_width, hidden=4 * self.width, norm_eps=NORM_EPS, qk_norm=self.qk_norm
        )

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "SD3Config":
        """From the entries of diffusers' `transformer/config.json`; what is missing has diffusers' default.

        Raises:
            ValueError: sizes of the wrong type, or a model with other inputs or layers than SD3's.
        """
        default = cls()
        heads = size(entries, "num_attention_heads", default.heads)
        head_width = size(entries, "attention_head_dim", default.head_width)
        channels = size(entries, "in_channels", default.latent_channels)
        layers = size(entries, "num_layers", default.layers)
        _require(entries, "patch_size", PATCH, (PATCH,))
        _require(entries, "out_channels", default.latent_channels, (channels, None))
        _require(entries, "caption_projection_dim", 1152, (heads * head_width,))
        _require(entries, "qk_norm", None, ("rms_norm", None))
        return cls(
            latent_channels=channels,
            layers=layers,
            heads=heads,
            head_width=head_width,
            text_width=size(entries, "joint_attention_dim", default.text_width),
            pooled_width=size(entries, "pooled_projection_dim", default.pooled_width),
            grid=size(entries, "pos_embed_max_size", default.grid),
            qk_norm=entries.get("qk_norm") is not None,
            dual_layers=_dual_layers(entries.get("dual_attention_layers", ()), layers),
            sample_cells=size(entries, "sample_size", default.sample_cells),
        )

    def entries(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        return {
            "sample_size": self.sample_cells,
            "patch_size": PATCH,
            "in_channels": self.latent_channels,
            "num_layers": self.layers,
            "attention_head_dim": self.head_width,
            "num_attention_heads": self.heads,
            "joint_attention_dim": self.text_width,
            "caption_projection_dim": self.width,
            "pooled_projection_dim": self.pooled_width,
            "out_channels": self.latent_channels,
            "pos_embed_max_size": self.grid,
            "dual_attention_layers": list(self.dual_layers),
            "qk_norm": "rms_norm" if self.qk_norm else None,
        }

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "SD3Config":
        """From the tensors of a checkpoint in one of the layouts of `sd3_key_map`.

        Raises:
            ValueError: shapes of another model.
        """
        width, channels, patch, _ = shapes.of("x_embedder.proj.weight", "pos_embed.proj.weight", axes=4)
        outputs, _ = shapes.of("final_layer.linear.weight", "proj_out.weight")
        query_norms = ("joint_blocks.0.x_block.attn.ln_q.weight", "transformer_blocks.0.attn.norm_q.weight")
        head_width = shapes.of(*query_norms, axes=1)[0] if shapes.has(*query_norms) else HEAD_WIDTH
        if patch != PATCH or outputs != channels * PATCH**2 or width % head_width:
            raise ValueError(
                f"tokens of {patch} x {patch} cells are {width} wide, of {channels * patch**2} values going in and "
                f"{outputs} coming out; only SD3 with {PATCH} x {PATCH} cells, outputs like its inputs and heads of "
                f"{head_width} can be used"
            )
        layers = shapes.count("joint_blocks.", "transformer_blocks.")
        second = ("joint_blocks.{}.x_block.attn2.qkv.weight", "transformer_blocks.{}.attn2.to_q.weight")
        return cls(
            latent_channels=channels,
            layers=layers,
            heads=width // head_width,
            head_width=head_width,
            text_width=shapes.of("context_embedder.weight")[1],
            pooled_width=shapes.of("y_embedder.mlp.0.weight", "time_text_embed.text_embedder.linear_1.weight")[1],
            grid=isqrt(shapes.of("pos_embed", "pos_embed.pos_embed", axes=3)[1]),
            qk_norm=shapes.has(*query_norms),
            dual_layers=tuple(i for i in range(layers) if shapes.has(*(name.format(i) for name in second))),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class SD3Prepared:
    """All that one run needs and that does not depend on the latents.

    `inputs[e]` is what the blocks read at evaluation e, `final[e]` the output layer's modulation; `places[index]` finds
    e by a point's index.
    """

    context: Tensor  # [B, Lt, D]
    positions: Tensor  # [N, D]
    runner: Runner
    inputs: Sequence[BlockInputs]
    final: Sequence[ShiftScale]
    places: Mapping[int, int]


class SD3Denoiser(HoistingModule):
    """See the module's first lines; implements `Denoiser`. Its conditioning has `pooled` text and states without
    padding."""

    hoisted: ClassVar[tuple[str, ...]] = ("modulation.", "last_modulation.", "positions")
    walked: ClassVar[tuple[str, ...]] = ("blocks",)

    def __init__(self, config: SD3Config) -> None:
        super().__init__()
        self.config = config
        width, token = config.width, config.latent_channels * PATCH**2
        self.image_in = nn.Linear(token, width)
        self.text_in = nn.Linear(config.text_width, width)
        self.time_embed = Embedder(SINUSOID_WIDTH, width)
        self.pooled_embed = Embedder(config.pooled_width, width)
        self.positions = nn.Parameter(torch.zeros(config.grid, config.grid, width))
        blocks = [self._block(i) for i in range(config.layers - 1)]
        self.blocks = nn.ModuleList([*blocks, LastJointBlock(config.block())])
        self.modulation = nn.ModuleList(nn.Linear(width, 3 * _count(block) * width) for block in blocks)
        self.last_modulation = nn.Linear(width, 8 * width)
        self.final_norm = LayerNorm(width, eps=NORM_EPS, affine=False)
        self.final_modulation = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, token)

    def prepare(
        self,
        conditioning: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> SD3Prepared:
        """Everything for latents of `shape` [B, C, 1, h, w] at these points.

        Raises:
            ValueError: latents or conditioning of a shape or kind that the model does not take.
        """
        self._check_fits(conditioning, shape)
        h = functional.silu(self.embed(conditioning, evaluations))  # [E, B, D]
        by_block = [*(self._modulations(i, h) for i in range(self.config.layers - 1)), self._last_modulations(h)]
        return SD3Prepared(
            context=self.text_in(conditioning.states.to(self.text_in.weight.dtype)),
            positions=self.positions_of(shape).to(h),
            runner=runner,
            inputs=[
                BlockInputs(rotary=None, mask=FULL, attention=attention, modulation=[block[e] for block in by_block])
                for e in range(len(evaluations))
            ],
            final=ungated(self.final_modulation(h)),
            places={point.index: e for e, point in enumerate(evaluations)},
        )

    def slope(self, x: Tensor, prepared: SD3Prepared, point: Point) -> Tensor:
        """noise - data, float32 [B, C, 1, h, w], at one of the points that were prepared."""
        e = prepared.places[point.index]
        tokens = self.image_in(patchify(x, PATCH).to(prepared.context.dtype)) + prepared.positions
        stream = Stream(x=tokens, context=prepared.context)
        stream = prepared.runner([*self.blocks], stream, prepared.inputs[e], NoCache())
        h = prepared.final[e].before(self.final_norm(stream.x))
        return unpatchify(self.output(h), x.shape, PATCH).float()

    def component(self) -> Component:
        """See `Saveable`."""
        from .sd3_keys import sd3_key_map

        key_map = sd3_key_map(self.config)
        return in_diffusers_layout("SD3Transformer2DModel", self.config.entries(), self.weights(), key_map)

    def embed(self, conditioning: Conditioning, evaluations: Sequence[Point]) -> Tensor:
        """What all modulations come from: time and pooled text in one vector, [E, B, D]."""
        assert conditioning.pooled is not None
        times = [point.time for point in evaluations]
        scaled = torch.tensor(times, dtype=torch.float32, device=conditioning.pooled.device) * TIME_SCALE
        return self.time_embed(sinusoid(scaled))[:, None] + self.pooled_embed(conditioning.pooled)

    def positions_of(self, shape: tuple[int, ...]) -> Tensor:
        """The middle of the table of positions, [N, D], for latents of `shape`; only its rows are read."""
        rows, columns = shape[3] // PATCH, shape[4] // PATCH
        top, left = (self.config.grid - rows) // 2, (self.config.grid - columns) // 2
        return self._rows_of_table(slice(top, top + rows))[:, left : left + columns].flatten(0, 1)

    def _rows_of_table(self, rows: slice) -> Tensor:
        if not self.positions.is_meta:
            return self.positions[rows]
        return self.source_of("positions").read_rows("positions", rows)

    def _block(self, i: int) -> JointBlock:
        kind = DualJointBlock if i in self.config.dual_layers else JointBlock
        return kind(self.config.block())

    def _modulations(self, i: int, h: Tensor) -> list[list[Modulation]]:
        """Those of block i, by evaluation."""
        table = self.projected(f"modulation.{i}", h)
        return [[*each] for each in gated(table, table.shape[-1] // (3 * self.config.width))]

    def _last_modulations(self, h: Tensor) -> list[list[Modulation]]:
        width = self.config.width
        own, context = self.projected("last_modulation", h).split((6 * width, 2 * width), dim=-1)
        return [[*each, read] for each, read in zip(gated(own, 2), ungated(context), strict=True)]

    def _check_fits(self, conditioning: Conditioning, shape: tuple[int, ...]) -> None:
        config = self.config
        check_states(conditioning, shape[0], config.text_width)
        check_pooled(conditioning, config.pooled_width)
        check_guidance(conditioning, guided=False)
        check_unpadded(conditioning)
        check_cells(shape, config.latent_channels, PATCH)
        if max(shape[3:]) > config.grid * PATCH:
            raise ValueError(f"latents are {shape}; this model knows positions of {config.grid * PATCH} cells a side")


def _count(block: JointBlock) -> int:
    """Modulations of a block, each of a shift, a scale and a gate."""
    return 5 if isinstance(block, DualJointBlock) else 4


def _dual_layers(value: object, layers: int) -> tuple[int, ...]:
    """Numbers of blocks before the last one."""
    numbers = tuple(cast(Sequence[int], value)) if isinstance(value, list | tuple) else (-1,)
    if not all(type(n) is int and 0 <= n < layers - 1 for n in numbers):
        wanted = f"whole numbers from 0 to {layers - 2}, below the last of num_layers {layers}"
        raise ValueError(f"{FILE}: dual_attention_layers is {value!r}; it must hold {wanted}")
    return numbers


def _require(entries: Mapping[str, Any], name: str, default: object, allowed: tuple[object, ...]) -> None:
    """Refuses a value that makes another network."""
    value = entries.get(name, default)
    if value not in allowed:
        wanted = " or ".join(repr(each) for each in allowed)
        raise ValueError(f"{FILE}: {name} is {value!r}; only {wanted} can be used here")
