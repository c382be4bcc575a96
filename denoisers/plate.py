"""The denoiser of `plate`: a single-stream diffusion transformer over picture tokens and text tokens.

Text states pass through unmodulated blocks once per run; then picture and text tokens share every block, modulated by
the time. Flow matching: the network gives the slope dx/dsigma = noise - data, and is told `1 - sigma`.

Legend: B rows, E evaluations, C latent channels, F frames, h w latent cells, P cells per token side,
N = F h w / P^2 picture tokens, Lt text tokens, Dt width of the text states, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.attention.base import AttentionMask, AttentionSelector
from ..core.blocks.decoder import DecoderBlock, DecoderConfig
from ..core.modulation import Modulation, ScaleGate, ShiftScale
from ..core.norms import RMSNorm
from ..core.rotary import Rotary, RotaryConfig, grid_positions, rotary_table
from ..core.stream import BlockInputs, NoCache, Runner, Stream, run_blocks, walk
from ..schedulers.base import Point
from .base import Conditioning
from .embedding import frequencies, sinusoid
from .fitting import text_mask
from .patches import patchify, unpatchify

TIME_SCALE = 300.0  # the largest angle of the time


@dataclass(frozen=True, kw_only=True)
class PlateDenoiserConfig:
    """Sizes. `rotary_axes` are the widths for (text position or frame, row, column); frames begin at `frame_offset` on
    the first axis; `places` is the largest number of token rows or columns, `frames` that of latent frames."""

    latent_channels: int = 8
    patch: int = 2
    width: int = 256
    heads: int = 4
    layers: int = 6
    text_layers: int = 2
    text_width: int = 192
    hidden: int = 640
    time_width: int = 128
    rotary_axes: tuple[int, int, int] = (16, 24, 24)
    rotary_theta: float = 100.0
    frame_offset: int = 32
    places: int = 32
    frames: int = 1
    norm_eps: float = 1e-6

    def block(self) -> DecoderConfig:
        """The blocks' config."""
        return DecoderConfig(
            width=self.width,
            heads=self.heads,
            kv_heads=self.heads,
            head_width=self.width // self.heads,
            hidden=self.hidden,
            norm_eps=self.norm_eps,
            qk_norm=True,
        )

    def rotary(self) -> RotaryConfig:
        """The rotary embedding's config."""
        return RotaryConfig(axes=self.rotary_axes, theta=self.rotary_theta, pairing="half")


@dataclass(frozen=True, kw_only=True)
class PlatePrepared:
    """All that one run of the denoiser needs and that does not depend on the latents.

    `modulation[e][i]` belongs to evaluation e and block i; `final[e]` to the output layer; `places[index]` finds e by a
    point's index.
    """

    text: Tensor  # [B, Lt, D]
    position: Tensor  # [N, D]
    rotary: Rotary
    mask: AttentionMask
    attention: AttentionSelector
    runner: Runner
    modulation: Sequence[Sequence[Sequence[Modulation]]]
    final: Sequence[ShiftScale]
    places: dict[int, int]

    def at(self, evaluation: int) -> BlockInputs:
        """What the blocks read in one evaluation."""
        return BlockInputs(
            rotary=self.rotary, mask=self.mask, attention=self.attention, modulation=self.modulation[evaluation]
        )


class PlateDenoiser(nn.Module):
    """See the module's first lines; implements `Denoiser`."""

    def __init__(self, config: PlateDenoiserConfig) -> None:
        super().__init__()
        self.config = config
        token = config.latent_channels * config.patch**2
        self.image_in = nn.Linear(token, config.width)
        self.text_norm_in = RMSNorm(config.text_width, eps=config.norm_eps)
        self.text_in = nn.Linear(config.text_width, config.width)
        self.text_blocks = nn.ModuleList(DecoderBlock(config.block()) for _ in range(config.text_layers))
        self.text_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.row = nn.Parameter(sine_table(config.places, config.width // 2))
        self.column = nn.Parameter(sine_table(config.places, config.width // 2))
        self.frame = nn.Parameter(torch.zeros(config.frames - 1, config.width)) if config.frames > 1 else None
        self.time_in = nn.Linear(config.time_width, config.time_width)
        self.time_out = nn.Linear(config.time_width, config.time_width)
        self.blocks = nn.ModuleList(DecoderBlock(config.block()) for _ in range(config.layers))
        self.modulation = nn.ModuleList(nn.Linear(config.time_width, 4 * config.width) for _ in range(config.layers))
        self.final_modulation = nn.Linear(config.time_width, 2 * config.width)
        self.final_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.output = nn.Linear(config.width, token)

    def prepare(
        self,
        conditioning: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> PlatePrepared:
        """Everything for latents of `shape` [B, C, F, h, w] at these points.

        Raises:
            ValueError: latents or text states of a shape that the model does not take.
        """
        self._check_fits(conditioning.states, shape)
        device = conditioning.states.device
        times = torch.tensor([point.time for point in evaluations], dtype=torch.float32, device=device)
        modulation, final = self.modulations(times)
        return PlatePrepared(
            text=self.refine_text(conditioning.states, conditioning.lengths, attention),
            position=self.position_embedding(shape),
            rotary=self.rotary_tables(shape, conditioning.states),
            mask=text_mask(conditioning.lengths, conditioning.states.shape[1], self.num_image_tokens(shape)),
            attention=attention,
            runner=runner,
            modulation=[_one_evaluation(modulation, e) for e in range(len(evaluations))],
            final=[
                ShiftScale(shift=final.shift[e : e + 1], scale=final.scale[e : e + 1]) for e in range(len(evaluations))
            ],
            places={point.index: e for e, point in enumerate(evaluations)},
        )

    def slope(self, x: Tensor, prepared: PlatePrepared, point: Point) -> Tensor:
        """noise - data, float32 [B, C, F, h, w], at one of the points that were prepared."""
        evaluation = prepared.places[point.index]
        inputs, final = prepared.at(evaluation), prepared.final[evaluation]
        return self.velocity(x, prepared.text, prepared.position, inputs, final, prepared.runner)

    def velocity(
        self, x: Tensor, text: Tensor, position: Tensor, inputs: BlockInputs, final: ShiftScale, runner: Runner
    ) -> Tensor:
        """The network itself: latents [B, C, F, h, w] and refined text [B, Lt, D] to the slope, float32."""
        tokens = self.image_tokens(x, text.dtype) + position.to(text.dtype)
        slopes = self.token_slopes(tokens, text, inputs, final, runner)
        return unpatchify(slopes, x.shape, self.config.patch).float()

    def image_tokens(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Latents [B, C, F, h, w] to picture tokens [B, N, D], which do not yet know where they are."""
        return self.image_in(patchify(x, self.config.patch).to(dtype))

    def token_slopes(
        self, tokens: Tensor, text: Tensor, inputs: BlockInputs, final: ShiftScale, runner: Runner
    ) -> Tensor:
        """Picture tokens [B, n, D] of any places and refined text [B, Lt, D] to the slopes of these tokens."""
        stream = walk(runner, list(self.blocks), Stream(x=torch.cat((tokens, text), dim=1)), inputs, NoCache())
        return self.output(final.before(self.final_norm(stream.x[:, : tokens.shape[1]])))

    def refine_text(self, states: Tensor, lengths: Tensor, attention: AttentionSelector) -> Tensor:
        """Text states [B, Lt, Dt] to text tokens [B, Lt, D]."""
        weight = self.text_in.weight
        h = self.text_in(self.text_norm_in(states.to(weight.dtype)))
        inputs = BlockInputs(
            rotary=rotary_table(self.config.rotary(), text_positions(states)),
            mask=text_mask(lengths, states.shape[1], 0),
            attention=attention,
        )
        return self.text_norm(run_blocks(list(self.text_blocks), Stream(x=h), inputs, NoCache()).x)

    def modulations(self, times: Tensor) -> tuple[list[list[ScaleGate]], ShiftScale]:
        """Per block the two sublayers' modulations, and the final one, for sigmas [E]: tensors [E, 1, D]."""
        weight = self.time_in.weight
        embedded = sinusoid(TIME_SCALE * (1 - times), self.config.time_width).to(weight.dtype)
        h = functional.silu(self.time_out(functional.silu(self.time_in(embedded))))
        per_block: list[list[ScaleGate]] = []
        for linear in self.modulation:
            scale_1, gate_1, scale_2, gate_2 = linear(h)[:, None].chunk(4, dim=-1)
            per_block.append([ScaleGate(scale=scale_1, gate=gate_1), ScaleGate(scale=scale_2, gate=gate_2)])
        scale, shift = self.final_modulation(h)[:, None].chunk(2, dim=-1)
        return per_block, ShiftScale(scale=scale, shift=shift)

    def rotary_tables(self, shape: tuple[int, ...], states: Tensor) -> Rotary:
        """Tables for picture tokens then text tokens."""
        return rotary_table(self.config.rotary(), torch.cat((self.places(shape, states), text_positions(states))))

    def places(self, shape: tuple[int, ...], states: Tensor) -> Tensor:
        """Where each picture token is on the axes of the rotary embedding, [N, 3], on the states' device."""
        _, _, frames, height, width = shape
        patch = self.config.patch
        start = (self.config.frame_offset, 0, 0)
        return grid_positions((frames, height // patch, width // patch), start=start).to(states.device)

    def position_embedding(self, shape: tuple[int, ...]) -> Tensor:
        """The learned embeddings of each picture token's row and column side by side, [N, D], in frames after the first
        plus that of the frame.

        Raises:
            ValueError: more rows, columns or frames than the model has embeddings for.
        """
        _, _, frames, height, width = shape
        rows, columns = height // self.config.patch, width // self.config.patch
        if max(rows, columns) > self.config.places:
            places = self.config.places
            raise ValueError(f"{rows} x {columns} picture tokens; this model has places for {places} a side")
        if frames > self.config.frames:
            raise ValueError(f"{frames} latent frames; this model makes up to {self.config.frames}")
        half = self.config.width // 2
        row = self.row[:rows, None].expand(rows, columns, half)
        column = self.column[None, :columns].expand(rows, columns, half)
        cells = torch.cat((row, column), dim=-1).flatten(0, 1)
        if self.frame is None:
            return cells
        later = cells + self.frame[: frames - 1, None]  # [F - 1, N / F, D]
        return torch.cat((cells, later.flatten(0, 1)))

    def num_image_tokens(self, shape: tuple[int, ...]) -> int:
        """N for latents of `shape`."""
        return shape[2] * shape[3] * shape[4] // self.config.patch**2

    def _check_fits(self, states: Tensor, shape: tuple[int, ...]) -> None:
        channels, width, patch = self.config.latent_channels, self.config.text_width, self.config.patch
        if states.shape[2] != width:
            raise ValueError(f"text states are {states.shape[2]} wide; this model reads states of width {width}")
        if states.shape[0] != shape[0]:
            raise ValueError(f"text states have {states.shape[0]} rows for {shape[0]} rows of latents")
        if shape[1] != channels or shape[3] % patch or shape[4] % patch:
            raise ValueError(f"latents are {shape}; this model takes {channels} channels, sides in steps of {patch}")


def sine_table(count: int, width: int) -> Tensor:
    """Where the row and column embeddings begin: sines and cosines of the place, [count, width]."""
    cpu = torch.device("cpu")
    angles = torch.arange(count, dtype=torch.float32, device=cpu)[:, None] * frequencies(width // 2, cpu)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def text_positions(states: Tensor) -> Tensor:
    """Where each text token is on the axes of the rotary embedding, [Lt, 3]."""
    index = torch.arange(states.shape[1], device=states.device)
    return functional.pad(index[:, None], (0, 2))


def _row(modulation: ScaleGate, e: int) -> ScaleGate:
    return ScaleGate(scale=modulation.scale[e : e + 1], gate=modulation.gate[e : e + 1])


def _one_evaluation(modulation: list[list[ScaleGate]], e: int) -> list[list[ScaleGate]]:
    return [[_row(sublayer, e) for sublayer in block] for block in modulation]
