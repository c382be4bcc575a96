"""LTX-Video: clips of video from text, and from a first picture, by blocks of self- and cross-attention.

Flow matching: the network gives the slope dx/dsigma = noise - data. A token is one latent cell. It stands at a time in
seconds and at a place in pixels, so that the conditioning's `time_ids` say where cells are. Latents of a picture are
taken as they are, as the clip's first frame: their tokens are told time 0. Models from 0.9.5 on may be told of each
frame how far it is known, and when it is shown: its tokens' time is then never over the noise that is left in it.

Source: diffusers' LTXVideoTransformer3DModel.

Legend: B rows, E evaluations, C latent channels, F frames, h w latent cells, N = F h w tokens, Lt text tokens, Dt text
width, D width.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.attention.base import AttentionMask, AttentionSelector
from ..core.blocks.cross_wide import WideCrossBlock
from ..core.mlp import GELUMLP
from ..core.norms import LayerNorm, RMSNorm
from ..core.saving import Component
from ..core.stream import KeysValues, NoCache, Runner, Stream, run_blocks, walk
from ..schedulers.base import Point
from .base import Conditioning
from .embedding import SINUSOID_WIDTH, TIME_SCALE, Embedder, sinusoid
from .fitting import check_clip, check_first_frames, check_guidance, check_picture_states, check_states, text_mask
from .hoisting import HoistingModule
from .ltx_config import FINAL_NORM_EPS, QK_NORM_EPS, LTXConfig
from .ltx_keys import ltx_key_map
from .ltx_rotary import NUM_PLACES, fractional_rotary, frame_levels
from .patches import patchify, unpatchify
from .saving import in_diffusers_layout
from .timed import TimedPrepared, keys_values

HOISTED = ("time_embed.", "time_projection.", "modulation.", "final_modulation", "text_in.", "text_keys_values.")
"""What the names of weights that only `prepare` uses begin with."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LTXPrepared(TimedPrepared):
    """`first` are latents of the clip's first frames, which are known. `times` are those of the tables' rows; no frame
    is told a time over its own of `levels`, where any are under 1."""

    first: Tensor | None  # [B, C, known frames, h, w]
    times: Sequence[float]
    levels: Sequence[float]
    area: int  # h w

    def _stretches(self, e: int) -> list[tuple[int, int]]:
        if min(self.levels) == 1:
            return super()._stretches(e)
        told = groupby(min(self.times[e], level) for level in self.levels)
        return [(self.times.index(time), self.area * len([*frames])) for time, frames in told]


class LTXDenoiser(HoistingModule):
    """See the module's first lines; implements `Denoiser` and `SharingDenoiser`.

    Its conditioning's rows may have different lengths: no token sees the padding. `time_ids` [B, 5] are
    the places that `fractional_rotary` reads; [B, 5 + 2 F] also say of each frame what `frame_ticks` and `frame_levels`
    read. `references` hold latents of the first frames, or nothing. In these frames the slope is whatever the network
    gives, which no sampler may follow: `FirstFramesKept` puts the one there that leads to them.
    """

    hoisted: ClassVar[tuple[str, ...]] = HOISTED
    walked: ClassVar[tuple[str, ...]] = ("blocks",)

    def __init__(self, config: LTXConfig) -> None:
        super().__init__()
        self.config = config
        width, layers = config.width, range(config.layers)
        self.image_in = nn.Linear(config.latent_channels, width)
        self.text_in = GELUMLP(config.text_width, width, width_out=width)
        self.time_embed = Embedder(SINUSOID_WIDTH, width)
        self.time_projection = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(WideCrossBlock(config.block()) for _ in layers)
        self.modulation = nn.ParameterList(nn.Parameter(torch.zeros(6, width)) for _ in layers)
        self.text_keys_values = nn.ModuleList(nn.Linear(width, 2 * width) for _ in layers)
        self.text_key_norms = nn.ModuleList(RMSNorm(width, eps=QK_NORM_EPS) for _ in layers)
        self.final_norm = LayerNorm(width, eps=FINAL_NORM_EPS, affine=False)
        self.final_modulation = nn.Parameter(torch.zeros(2, width))
        self.output = nn.Linear(width, config.latent_channels)

    def prepare(
        self,
        conditioning: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> LTXPrepared:
        """Everything for latents of `shape` [B, C, F, h, w] at these points.

        Raises:
            ValueError: latents or conditioning of a shape or kind that the model does not take.
        """
        told = self._told(conditioning, shape)
        times = (*(point.time for point in evaluations), *sorted({level for level in told["levels"] if level < 1}), 0.0)
        embedded = self.embed(times)
        exact = embedded.float()
        return LTXPrepared(
            **told,
            mask=AttentionMask(grid=(shape[2], shape[3], shape[4])),
            attention=attention,
            runner=runner,
            tables=torch.stack([self.value(f"modulation.{i}", exact) for i in range(self.config.layers)]).flatten(1),
            projections=self.projected("time_projection", functional.silu(embedded)),
            final_table=self.value("final_modulation", exact),
            embedded=embedded,
            times=times,
            places={point.index: e for e, point in enumerate(evaluations)},
        )

    def prepare_beside(self, prepared: LTXPrepared, conditioning: Conditioning, shape: tuple[int, ...]) -> LTXPrepared:
        """See `SharingDenoiser`: all that depends on time is shared. ValueError where other frames are known."""
        told = self._told(conditioning, shape)
        if told["levels"] != prepared.levels:
            raise ValueError("time_ids: both sides of a guidance must know the same of each frame")
        return dataclasses.replace(prepared, **told)

    def slope(self, x: Tensor, prepared: LTXPrepared, point: Point) -> Tensor:
        """noise - data, float32 [B, C, F, h, w], at one of the points that were prepared."""
        e, known, dtype = prepared.places[point.index], prepared.first, self.image_in.weight.dtype
        shown = x if known is None else torch.cat((known, x[:, :, known.shape[2] :]), dim=2)
        stream = Stream(x=self.image_in(patchify(shown, 1).to(dtype)))
        h = walk(prepared.runner, [*self.blocks], stream, prepared.inputs(e), NoCache()).x
        h = prepared.final(e).before(self.final_norm(h.float())).to(dtype)
        return unpatchify(self.output(h), x.shape, 1).float()

    def component(self) -> Component:
        """See `Saveable`."""
        return in_diffusers_layout("LTXVideoTransformer3DModel", self.config.entries(), self.weights(), ltx_key_map())

    def embed(self, times: Sequence[float]) -> Tensor:
        """What all modulations come from, [E, D] for E times."""
        device, dtype = self.image_in.weight.device, self.image_in.weight.dtype
        values = torch.tensor([TIME_SCALE * time for time in times], device=device)
        h = self.projected("time_embed.inner", sinusoid(values).to(dtype))
        return self.projected("time_embed.outer", functional.silu(h))

    def _told(self, conditioning: Conditioning, shape: tuple[int, ...]) -> dict[str, Any]:
        """What depends on the conditioning of what is prepared."""
        places = self._checked(conditioning, shape)
        known = next(iter(conditioning.references), None)
        cells = (shape[2], shape[3], shape[4])
        num_known, area = 0 if known is None else known.shape[2], shape[3] * shape[4]
        same = bool((places == places[:1]).all())
        return {
            "crossed": [[each] for each in self._crossed(conditioning)],
            "first": known,
            "lengths": (area * num_known, area * (shape[2] - num_known)),
            "levels": frame_levels(places, shape[2]),
            "area": area,
            "rotary": fractional_rotary(self.config.width, cells, places[:1] if same else places),
        }

    def _crossed(self, conditioning: Conditioning) -> list[KeysValues]:
        """By block, the keys and values of the text, up to the end of the longest row's."""
        longest = int(conditioning.lengths.max())
        states = conditioning.states[:, :longest].to(self.image_in.weight.dtype)
        h = self.projected("text_in.up", states)
        states = self.projected("text_in.down", functional.gelu(h, approximate="tanh"))
        mask, heads = text_mask(conditioning.lengths.to(states.device), longest, 0), self.config.heads
        return [keys_values(self, "text", i, states, heads=heads, mask=mask) for i in range(self.config.layers)]

    def _checked(self, conditioning: Conditioning, shape: tuple[int, ...]) -> Tensor:
        """The `time_ids`, where all fits. ValueError otherwise."""
        check_states(conditioning, shape[0], self.config.text_width)
        check_guidance(conditioning, guided=False)
        check_picture_states(conditioning, None, None)
        check_clip(shape, self.config.latent_channels, 1)
        check_first_frames([tuple(each.shape) for each in conditioning.references], shape)
        places = conditioning.time_ids
        if places is None or places.shape[1] not in (NUM_PLACES, NUM_PLACES + 2 * shape[2]):
            found = "missing" if places is None else f"{places.shape[1]} numbers"
            raise ValueError(f"time_ids are {found}; this model is told {NUM_PLACES}, which say where cells are")
        if places.shape[1] > NUM_PLACES and conditioning.references:
            raise ValueError("references: time_ids say already what is known of each frame; give one of the two")
        return places.to(self.image_in.weight.device)
