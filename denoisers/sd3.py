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
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.blocks.joint import JointBlock
from ..core.blocks.joint_variants import DualJointBlock, LastJointBlock
from ..core.modulation import Modulation, ShiftScale
from ..core.norms import LayerNorm
from ..core.saving import Component
from ..core.stream import BlockInputs, NoCache, Runner, Stream, walk
from ..schedulers.base import Point
from .base import Conditioning
from .embedding import SINUSOID_WIDTH, TIME_SCALE, Embedder, sinusoid
from .fitting import check_cells, check_guidance, check_pooled, check_states, text_mask
from .guidance import Run
from .hoisting import gated, ungated
from .pairing import PairingModule
from .patches import patchify, unpatchify
from .saving import in_diffusers_layout
from .sd3_config import NORM_EPS, PATCH, SD3Config
from .sd3_keys import sd3_key_map


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


class SD3Denoiser(PairingModule[SD3Prepared]):
    """See the module's first lines; implements `Denoiser` and `PairingDenoiser`. Its conditioning has `pooled`
    text."""

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

    def prepared_for(self, conditionings: Sequence[Conditioning], run: Run) -> list[SD3Prepared]:
        """See `PairingModule`."""
        for conditioning in conditionings:
            self._check_fits(conditioning, run.shape)
        h = [functional.silu(self.embed(each, run.evaluations)) for each in conditionings]  # [E, B, D]
        by_block = [*(self._modulations(i, h) for i in range(self.config.layers - 1)), self._last_modulations(h)]
        positions = self.positions_of(run.shape).to(h[0])
        return [
            self._prepared(conditioning, [each[n] for each in by_block], h[n], positions, run)
            for n, conditioning in enumerate(conditionings)
        ]

    def slope(self, x: Tensor, prepared: SD3Prepared, point: Point) -> Tensor:
        """noise - data, float32 [B, C, 1, h, w], at one of the points that were prepared."""
        e = prepared.places[point.index]
        tokens = self.image_in(patchify(x, PATCH).to(prepared.context.dtype)) + prepared.positions
        stream = Stream(x=tokens, context=prepared.context)
        stream = walk(prepared.runner, [*self.blocks], stream, prepared.inputs[e], NoCache())
        h = prepared.final[e].before(self.final_norm(stream.x))
        return unpatchify(self.output(h), x.shape, PATCH).float()

    def component(self) -> Component:
        """See `Saveable`."""
        key_map = sd3_key_map(self.config)
        return in_diffusers_layout("SD3Transformer2DModel", self.config.entries(), self.weights(), key_map)

    def _prepared(
        self,
        conditioning: Conditioning,
        by_block: Sequence[list[list[Modulation]]],
        h: Tensor,
        positions: Tensor,
        run: Run,
    ) -> SD3Prepared:
        """For one conditioning; padding is cut off where all rows have it, and hidden where some do."""
        longest = int(conditioning.lengths.max())
        mask = text_mask(conditioning.lengths, longest, len(positions))
        return SD3Prepared(
            context=self.text_in(conditioning.states[:, :longest].to(self.text_in.weight.dtype)),
            positions=positions,
            runner=run.runner,
            inputs=[
                BlockInputs(rotary=None, mask=mask, attention=run.attention, modulation=[each[e] for each in by_block])
                for e in range(len(run.evaluations))
            ],
            final=ungated(self.final_modulation(h)),
            places={point.index: e for e, point in enumerate(run.evaluations)},
        )

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

    def _modulations(self, i: int, h: Sequence[Tensor]) -> list[list[list[Modulation]]]:
        """Those of block i, by conditioning and evaluation."""
        tables = self.projections(f"modulation.{i}", h)
        count = tables[0].shape[-1] // (3 * self.config.width)
        return [[[*each] for each in gated(table, count)] for table in tables]

    def _last_modulations(self, h: Sequence[Tensor]) -> list[list[list[Modulation]]]:
        parts = (6 * self.config.width, 2 * self.config.width)
        tables = [table.split(parts, dim=-1) for table in self.projections("last_modulation", h)]
        return [
            [[*each, read] for each, read in zip(gated(own, 2), ungated(context), strict=True)]
            for own, context in tables
        ]

    def _check_fits(self, conditioning: Conditioning, shape: tuple[int, ...]) -> None:
        config = self.config
        check_states(conditioning, shape[0], config.text_width)
        check_pooled(conditioning, config.pooled_width)
        check_guidance(conditioning, guided=False)
        check_cells(shape, config.latent_channels, PATCH)
        if max(shape[3:]) > config.grid * PATCH:
            raise ValueError(f"latents are {shape}; this model knows positions of {config.grid * PATCH} cells a side")


def _count(block: JointBlock) -> int:
    """Modulations of a block, each of a shift, a scale and a gate."""
    return 5 if isinstance(block, DualJointBlock) else 4
