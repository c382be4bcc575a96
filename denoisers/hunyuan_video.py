"""HunyuanVideo 1.5: clips from text, and from pictures, by joint two-stream blocks over the clip and all it is told.

Flow matching: the network gives the slope dx/dsigma = noise - data. The context is, row by row, the states of a
picture, of the texts that are to be read in the clip (glyphs), and of the prompt, with no gap between them. Modulations
depend on time alone, so their weights (33 % of all) are read by `prepare` and never by a step. Gates of the two blocks
that refine the prompt's states depend on time too: those blocks are run again in each evaluation.

A clip that begins with a picture is told its latents beside the noisy ones, with a mask of the frames that they fill.

Source: diffusers' HunyuanVideo15Transformer3DModel.

Legend: B rows, E evaluations, C latent channels, F frames, h w latent cells, P cells per token side, N = F h w / P^2
tokens, Lt text tokens, Dt text width, Lg glyph tokens, Lp picture states, Lc = Lp + Lg + Lt context tokens (of the
longest row), D width.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.attention.base import AttentionMask, AttentionSelector
from ..core.blocks.joint import JointBlock
from ..core.modulation import Modulation, ShiftScale
from ..core.norms import LayerNorm
from ..core.rotary import Rotary, grid_positions, rotary_table
from ..core.saving import Component
from ..core.stream import BlockInputs, NoCache, Runner, Stream, run_blocks, walk
from ..schedulers.base import Point
from .base import Conditioning
from .embedding import SINUSOID_WIDTH, TIME_SCALE, Embedder, sinusoid
from .fitting import check_clip, check_guidance, check_other_states, check_picture_states, check_states, text_mask
from .hoisting import HoistingModule, gated, ungated
from .hunyuan_refiner import GlyphProjection, RefinerBlock
from .hunyuan_video_config import NORM_EPS, HunyuanVideoConfig
from .hunyuan_video_keys import hunyuan_video_key_map
from .patches import patchify, unpatchify
from .saving import in_diffusers_layout
from .wan import PictureProjection

HOISTED = ("modulation.",)
"""What the names of weights that only `prepare` uses begin with."""
OF_TEXT, OF_GLYPHS, OF_PICTURES = range(3)
"""The kinds of context tokens, each with an embedding of its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HunyuanVideoPrepared:
    """All that one run needs and that does not depend on the latents.

    `text` are the prompt's states before they are refined, `gates[e]` those of the refining blocks in evaluation e,
    `text_mask` what hides their padding. `fixed` are the other context tokens; `order[b]` puts both together for row b.
    `beside` are patches that go beside those of the latents. `modulation[e]` are evaluation e's modulations of the
    blocks, `final[e]` that of the output layer; `places[index]` finds e by a point's index. `refiner_times` are what
    the gates' part of time comes from.
    """

    text: Tensor  # [B, Lt, D]
    text_mask: AttentionMask
    gates: Sequence[Sequence[tuple[Tensor, Tensor]]]
    fixed: Tensor  # [B, Lp + Lg, D]
    order: Tensor  # [B, Lc] int64
    beside: Tensor | None  # [B, N, (C + 1) P P]
    rotary: Rotary
    mask: AttentionMask
    attention: AttentionSelector
    runner: Runner
    modulation: Sequence[Sequence[Sequence[Modulation]]]
    final: Sequence[ShiftScale]
    refiner_times: Tensor  # [E, D]
    places: Mapping[int, int]

    def inputs(self, e: int) -> BlockInputs:
        """What the blocks read in evaluation e."""
        return BlockInputs(rotary=self.rotary, mask=self.mask, attention=self.attention, modulation=self.modulation[e])


class HunyuanVideoDenoiser(HoistingModule):
    """See the module's first lines; implements `Denoiser` and `SharingDenoiser`.

    Its conditioning may be padded; `other_states` are those of glyphs, of which rows may have none. `references` hold
    nothing, or one tensor: latents that are shown, and their mask; then `picture_states` are those of the picture.
    """

    hoisted: ClassVar[tuple[str, ...]] = HOISTED
    walked: ClassVar[tuple[str, ...]] = ("blocks",)

    def __init__(self, config: HunyuanVideoConfig) -> None:
        super().__init__()
        self.config = config
        width, cells = config.width, config.patch**2
        self.image_in = nn.Linear((config.latent_channels + config.beside_channels) * cells, width)
        self.text_in = nn.Linear(config.text_width, width)
        self.refiner_time = Embedder(SINUSOID_WIDTH, width)
        self.refiner_text = Embedder(config.text_width, width)
        refiner = range(config.refiner_layers)
        self.refiner = nn.ModuleList(RefinerBlock(config.heads, config.head_width) for _ in refiner)
        self.refiner_gates = nn.ModuleList(nn.Linear(width, 2 * width) for _ in refiner)
        self.glyph_in = GlyphProjection(config.glyph_width, config.glyph_hidden, width)
        self.picture_in = PictureProjection(config.picture_width, width, None)
        self.kinds = nn.Parameter(torch.zeros(3, width))
        self.time_embed = Embedder(SINUSOID_WIDTH, width)
        self.next_time_embed = Embedder(SINUSOID_WIDTH, width) if config.meanflow else None
        self.blocks = nn.ModuleList(JointBlock(config.block()) for _ in range(config.layers))
        self.modulation = nn.ModuleList(nn.Linear(width, 12 * width) for _ in range(config.layers))
        self.final_norm = LayerNorm(width, eps=NORM_EPS, affine=False)
        self.final_modulation = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, config.latent_channels * cells)

    def prepare(
        self,
        conditioning: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> HunyuanVideoPrepared:
        """Everything for latents of `shape` [B, C, F, h, w] at these points.

        Raises:
            ValueError: latents or conditioning of a shape or kind that the model does not take.
        """
        self._check_fits(conditioning, shape)
        times = [point.time for point in evaluations]
        refiner_times = self.refiner_time(self._sinusoids(times))
        h = functional.silu(self.embed(times, steps=conditioning.picture_states is not None))[:, None]  # [E, 1, D]
        blocks = [gated(self.projected(f"modulation.{i}", h), 4) for i in range(self.config.layers)]
        return HunyuanVideoPrepared(
            **self._told(conditioning, shape, refiner_times),
            attention=attention,
            runner=runner,
            modulation=[[block[e] for block in blocks] for e in range(len(evaluations))],
            final=ungated(self.final_modulation(h)),
            refiner_times=refiner_times,
            places={point.index: e for e, point in enumerate(evaluations)},
        )

    def prepare_beside(
        self, prepared: HunyuanVideoPrepared, conditioning: Conditioning, shape: tuple[int, ...]
    ) -> HunyuanVideoPrepared:
        """See `SharingDenoiser`: the modulations are shared."""
        self._check_fits(conditioning, shape)
        return dataclasses.replace(prepared, **self._told(conditioning, shape, prepared.refiner_times))

    def slope(self, x: Tensor, prepared: HunyuanVideoPrepared, point: Point) -> Tensor:
        """noise - data, float32 [B, C, F, h, w], at one of the points that were prepared."""
        e, dtype = prepared.places[point.index], self.image_in.weight.dtype
        tokens = patchify(x, self.config.patch)
        if prepared.beside is not None:
            tokens = torch.cat((tokens, prepared.beside), dim=-1)
        weight = self.image_in.weight[:, : tokens.shape[-1]]  # what is not there would be zeros
        tokens = functional.linear(tokens.to(dtype), weight, self.image_in.bias)
        stream = Stream(x=tokens, context=self._context(prepared, e))
        h = walk(prepared.runner, [*self.blocks], stream, prepared.inputs(e), NoCache()).x
        return unpatchify(self.output(prepared.final[e].before(self.final_norm(h))), x.shape, self.config.patch).float()

    def component(self) -> Component:
        """See `Saveable`."""
        return in_diffusers_layout(
            "HunyuanVideo15Transformer3DModel", self.config.entries(), self.weights(), hunyuan_video_key_map()
        )

    def embed(self, times: Sequence[float], *, steps: bool) -> Tensor:
        """What all modulations come from, [E, D] for E times; with `steps`, also of the times that these lead to, each
        the next one and the last one 0, where the model is told such."""
        embedded = self.time_embed(self._sinusoids(times))
        if self.next_time_embed is None or not steps:
            return embedded
        return embedded + self.next_time_embed(self._sinusoids([*times[1:], 0.0]))

    def _sinusoids(self, times: Sequence[float]) -> Tensor:
        return sinusoid(torch.tensor([TIME_SCALE * time for time in times], device=self.image_in.weight.device))

    def _context(self, prepared: HunyuanVideoPrepared, e: int) -> Tensor:
        """The context [B, Lc, D] in evaluation e."""
        text = prepared.text
        for block, gates in zip(self.refiner, prepared.gates[e], strict=True):
            text = block(text, gates, prepared.text_mask, prepared.attention)
        tokens = torch.cat((prepared.fixed, text + self.kinds[OF_TEXT]), dim=1)
        return torch.take_along_dim(tokens, prepared.order[..., None], dim=1)

    def _told(self, conditioning: Conditioning, shape: tuple[int, ...], refiner_times: Tensor) -> dict[str, Any]:
        """What depends on the conditioning of what is prepared."""
        weight, patch = self.image_in.weight, self.config.patch
        longest = int(conditioning.lengths.max())
        states = conditioning.states[:, :longest].to(weight)
        beside = next(iter(conditioning.references), None)
        fixed, is_there = self._fixed(conditioning)
        is_text = _own(conditioning.lengths.to(weight.device), longest)
        order, lengths = _packed(torch.cat((is_there, is_text), dim=1))
        grid = (shape[2], shape[3] // patch, shape[4] // patch)
        places = grid_positions(grid)
        nowhere = places.new_zeros(order.shape[1], 3)  # where the rotary embedding changes nothing
        return {
            "text": self.text_in(states),
            "text_mask": text_mask(conditioning.lengths, longest, 0),
            "gates": self._gates(states, is_text, refiner_times),
            "fixed": fixed,
            "order": order,
            "beside": None if beside is None else patchify(beside, patch),
            "rotary": rotary_table(self.config.rotary(), torch.cat((places, nowhere)).to(weight.device)),
            "mask": text_mask(lengths, order.shape[1], len(places), grid),
        }

    def _gates(self, states: Tensor, is_text: Tensor, refiner_times: Tensor) -> list[list[tuple[Tensor, Tensor]]]:
        """By evaluation, then refining block, the gates of its attention and MLP, [B, 1, D] each."""
        total = (states.float() * is_text[..., None]).sum(dim=1)
        mean = self.refiner_text(total / is_text.sum(dim=1, keepdim=True))
        h = functional.silu(refiner_times[:, None] + mean)  # [E, B, D]
        tables = [gates(h)[:, :, None].chunk(2, dim=-1) for gates in self.refiner_gates]
        return [[(attention[e], mlp[e]) for attention, mlp in tables] for e in range(len(h))]

    def _fixed(self, conditioning: Conditioning) -> tuple[Tensor, Tensor]:
        """Context tokens of pictures and glyphs [B, Lp + Lg, D], and which of them are there [B, Lp + Lg]."""
        weight, rows = self.image_in.weight, conditioning.num_rows
        tokens, is_there = weight.new_zeros(rows, 0, self.config.width), weight.new_zeros(rows, 0, dtype=torch.bool)
        pictures, glyphs, lengths = conditioning.picture_states, conditioning.other_states, conditioning.other_lengths
        if pictures is not None:
            tokens = self.picture_in(pictures.to(weight)) + self.kinds[OF_PICTURES]
            is_there = is_there.new_ones(tokens.shape[:2])
        if glyphs is None or lengths is None or not bool(lengths.any()):
            return tokens, is_there
        longest = int(lengths.max())
        mine = self.glyph_in(glyphs[:, :longest].to(weight)) + self.kinds[OF_GLYPHS]
        is_there = torch.cat((is_there, _own(lengths.to(weight.device), longest)), dim=1)
        return torch.cat((tokens, mine), dim=1), is_there

    def _check_fits(self, conditioning: Conditioning, shape: tuple[int, ...]) -> None:
        config = self.config
        rows, _, *sides = shape
        check_states(conditioning, rows, config.text_width)
        check_other_states(conditioning, config.glyph_width)
        check_guidance(conditioning, guided=False)
        check_picture_states(conditioning, None if conditioning.picture_states is None else config.picture_width, None)
        check_clip(shape, config.latent_channels, config.patch)
        if not bool((conditioning.lengths > 0).all()):
            raise ValueError(f"lengths are {conditioning.lengths.tolist()}; each row must have a token at least")
        found, wanted = [tuple(each.shape) for each in conditioning.references], (rows, config.beside_channels, *sides)
        if found not in ([], [wanted]):
            raise ValueError(f"references are of shapes {found}; this model reads none, or one of {wanted}")


def _own(lengths: Tensor, longest: int) -> Tensor:
    """Which tokens are a row's own, [B, L] for `lengths` [B]."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def _packed(is_there: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the places of its tokens that are there one after the other, [B, Lc] with any others behind, and
    how many there are, [B]; of `is_there` [B, L]."""
    lengths = is_there.sum(dim=1)
    order = torch.argsort((~is_there).to(torch.uint8), dim=1, stable=True)
    return order[:, : int(lengths.max())], lengths
