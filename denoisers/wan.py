"""Wan 2.1 and 2.2: clips of video from text, and from pictures, by blocks of self- and cross-attention.

Flow matching: the network gives the slope dx/dsigma = noise - data. Everything but the tokens of the clip is the same
at every step, or depends on time alone: keys and values of the text and of pictures, and what modulations come from,
are made by `prepare`, whose weights (15 % of a 14B) no step reads.

Three kinds of networks see a picture. Those of image-to-video read channels beside the latents' own (a mask, and
latents of the clip in which only the picture is filled in), those of Wan 2.1 also the states of a picture encoder.
Wan 2.2 TI2V-5B takes latents of the clip's first frames as they are: their tokens are told time 0, and their slope
leads to them. Without a picture it makes clips from text like the others.

Source: diffusers' WanTransformer3DModel, and Wan-AI's repositories.

Legend: B rows, E evaluations, C latent channels, F frames, h w latent cells, P = 2 cells per token side,
N = F h w / P^2 tokens, Lt text tokens, Dt text width, Lp picture states, Dv their width, Lc text tokens or picture
states, D width.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.attention.base import AttentionMask, AttentionSelector
from ..core.blocks.cross import CrossBlock
from ..core.mlp import GELUMLP
from ..core.norms import LayerNorm, RMSNorm
from ..core.rotary import Rotary, grid_positions, rotary_table
from ..core.saving import Component
from ..core.stream import Cache, KeysValues, NoCache, Runner, Stream, run_blocks, walk
from ..schedulers.base import Point
from .base import Conditioning
from .embedding import TIME_SCALE, Embedder, sinusoid
from .fitting import check_clip, check_first_frames, check_guidance, check_picture_states, check_states
from .hoisting import HoistingModule
from .patches import patchify, unpatchify_channels_last
from .saving import in_diffusers_layout
from .timed import TimedPrepared, keys_values
from .wan_config import PATCH, TEXT_TOKENS, WanConfig
from .wan_keys import wan_key_map

HOISTED = (
    "time_embed.",
    "time_projection.",
    "modulation.",
    "final_modulation",
    "text_keys_values.",
    "picture_keys_values.",
)
"""What the names of weights that only `prepare` uses begin with."""
PICTURE_NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class WanPrepared(TimedPrepared):
    """`crossed[i]` are the keys and values of the text, then of pictures. `beside` are patches that go beside those of
    the latents; `first` are latents of the clip's first frames, which are known."""

    beside: Tensor | None  # [B, N, (channels beside) P P]
    first: Tensor | None  # [B, C, known frames, h, w]


class PictureProjection(nn.Module):
    """What blocks read, of a picture encoder's states: norm(mlp(norm(states + positions)))."""

    def __init__(self, width: int, width_out: int, num_positions: int | None) -> None:
        super().__init__()
        self.positions = None if num_positions is None else nn.Parameter(torch.zeros(1, num_positions, width))
        self.norm = LayerNorm(width, eps=PICTURE_NORM_EPS)
        self.mlp = GELUMLP(width, width, width_out=width_out, approximate="none")
        self.final_norm = LayerNorm(width_out, eps=PICTURE_NORM_EPS)

    def forward(self, states: Tensor) -> Tensor:
        """[B, Lp, Dv] to [B, Lp, D]."""
        h = states if self.positions is None else states + self.positions
        return self.final_norm(self.mlp(self.norm(h)))


class WanDenoiser(HoistingModule):
    """See the module's first lines; implements `Denoiser` and `SharingDenoiser`.

    Its conditioning's rows may have different lengths; the model attends to zeros after a row's own tokens, up to 512.
    `references` hold one tensor: the channels beside, where the model reads any; else latents of the first frames, or
    nothing. `picture_states` are there where the model has them read.
    """

    hoisted: ClassVar[tuple[str, ...]] = HOISTED
    walked: ClassVar[tuple[str, ...]] = ("blocks",)

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.config = config
        width, layers, pictures = config.width, range(config.layers), config.picture_width
        self.image_in = nn.Linear((config.latent_channels + config.beside_channels) * PATCH**2, width)
        self.text_in = GELUMLP(config.text_width, width, width_out=width)
        self.time_embed = Embedder(config.time_width, width)
        self.time_projection = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(CrossBlock(config.block()) for _ in layers)
        self.modulation = nn.ParameterList(nn.Parameter(torch.zeros(1, 6, width)) for _ in layers)
        self.text_keys_values = nn.ModuleList(nn.Linear(width, 2 * width) for _ in layers)
        self.text_key_norms = nn.ModuleList(RMSNorm(width, eps=config.norm_eps) for _ in layers)
        self.picture_in = None if pictures is None else PictureProjection(pictures, width, config.picture_positions)
        if pictures is not None:
            self.picture_keys_values = nn.ModuleList(nn.Linear(width, 2 * width) for _ in layers)
            self.picture_key_norms = nn.ModuleList(RMSNorm(width, eps=config.norm_eps) for _ in layers)
        self.final_norm = LayerNorm(width, eps=config.norm_eps, affine=False)
        self.final_modulation = nn.Parameter(torch.zeros(1, 2, width))
        self.output = nn.Linear(width, config.latent_channels * PATCH**2)

    def prepare(
        self,
        conditioning: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> WanPrepared:
        """Everything for latents of `shape` [B, C, F, h, w] at these points.

        Raises:
            ValueError: latents or conditioning of a shape or kind that the model does not take.
        """
        told = self._told(conditioning, shape)
        embedded = self.embed([*(point.time for point in evaluations), 0.0])
        exact = embedded.float()
        return WanPrepared(
            **told,
            rotary=self.rotary(shape),
            mask=AttentionMask(grid=(shape[2], shape[3] // PATCH, shape[4] // PATCH)),
            attention=attention,
            runner=runner,
            tables=torch.cat([self.value(f"modulation.{i}", exact) for i in range(self.config.layers)]).flatten(1),
            projections=self.projected("time_projection", functional.silu(embedded)),
            final_table=self.value("final_modulation", exact)[0],
            embedded=embedded,
            places={point.index: e for e, point in enumerate(evaluations)},
        )

    def prepare_beside(self, prepared: WanPrepared, conditioning: Conditioning, shape: tuple[int, ...]) -> WanPrepared:
        """See `SharingDenoiser`: all that depends on time or the clip's size is shared."""
        return dataclasses.replace(prepared, **self._told(conditioning, shape))

    def slope(self, x: Tensor, prepared: WanPrepared, point: Point) -> Tensor:
        """noise - data, float32 [B, C, F, h, w], at one of the points that were prepared; in known frames, the slope
        from which x0 follows as they are."""
        e, known = prepared.places[point.index], prepared.first
        if known is None:
            return self.predicted(x, prepared, e, NoCache())
        rest = x[:, :, known.shape[2] :]
        slope = self.predicted(torch.cat((known, rest), dim=2), prepared, e, NoCache())
        given = (x[:, :, : known.shape[2]] - known) / point.sigma
        return torch.cat((given, slope[:, :, known.shape[2] :]), dim=2)

    def predicted(self, x: Tensor, prepared: WanPrepared, e: int, cache: Cache) -> Tensor:
        """What the network makes of latents x [B, C, F, h, w] in evaluation e, float32 of the same shape."""
        h = self.read(x, prepared, e, cache)
        h = prepared.final(e).before(self.final_norm(h.float())).to(h.dtype)
        return unpatchify_channels_last(self.output(h), x.shape, PATCH).float()

    def read(self, x: Tensor, prepared: WanPrepared, e: int, cache: Cache) -> Tensor:
        """The tokens [B, N, D] of latents x after all blocks in evaluation e (-1: at time 0); they attend to what the
        cache gives back."""
        tokens = patchify(x, PATCH)
        if prepared.beside is not None:
            tokens = torch.cat((tokens, prepared.beside), dim=-1)
        stream = Stream(x=self.image_in(tokens.to(self.image_in.weight.dtype)))
        return walk(prepared.runner, [*self.blocks], stream, prepared.inputs(e), cache).x

    def rotary(self, shape: Sequence[int], start: int = 0) -> Rotary:
        """The tables of latents of `shape` [B, C, F, h, w], whose first frame is number `start` of its clip."""
        sizes = (shape[2], shape[3] // PATCH, shape[4] // PATCH)
        positions = grid_positions(sizes, start=(start, 0, 0)).to(self.image_in.weight.device)
        return rotary_table(self.config.rotary(), positions)

    def component(self) -> Component:
        """See `Saveable`."""
        return in_diffusers_layout("WanTransformer3DModel", self.config.entries(), self.weights(), wan_key_map())

    def embed(self, times: Sequence[float]) -> Tensor:
        """What all modulations come from, [E, D] for E times; computed in float32, as in the reference."""
        values = torch.tensor([TIME_SCALE * time for time in times], device=self.image_in.weight.device)
        h = functional.silu(self._exact("time_embed.inner", sinusoid(values, self.config.time_width)))
        return self._exact("time_embed.outer", h).to(self.image_in.weight.dtype)

    def _exact(self, name: str, h: Tensor) -> Tensor:
        """The linear layer `name` in the dtype of h."""
        return functional.linear(h, self.value(f"{name}.weight", h), self.value(f"{name}.bias", h))

    def _told(self, conditioning: Conditioning, shape: tuple[int, ...]) -> dict[str, Any]:
        """What depends on the conditioning of what is prepared."""
        self._check_fits(conditioning, shape)
        beside, known = self._seen(conditioning)
        area = shape[3] * shape[4] // PATCH**2
        num_known = 0 if known is None else known.shape[2]
        return {
            "crossed": self._crossed(conditioning),
            "beside": None if beside is None else patchify(beside, PATCH),
            "first": known,
            "lengths": (area * num_known, area * (shape[2] - num_known)),
        }

    def _seen(self, conditioning: Conditioning) -> tuple[Tensor | None, Tensor | None]:
        """The channels beside the latents' own, and latents of the first frames."""
        reference = next(iter(conditioning.references), None)
        return (reference, None) if self.config.beside_channels else (None, reference)

    def _crossed(self, conditioning: Conditioning) -> list[list[KeysValues]]:
        """By block, the keys and values of the text and of pictures."""
        dtype = self.image_in.weight.dtype
        read = {"text": self.text_in(filled_with_zeros(conditioning, TEXT_TOKENS).to(dtype))}
        if self.picture_in is not None and conditioning.picture_states is not None:
            read["picture"] = self.picture_in(conditioning.picture_states.to(dtype))
        return [
            [keys_values(self, kind, i, states, heads=self.config.heads) for kind, states in read.items()]
            for i in range(self.config.layers)
        ]

    def _check_fits(self, conditioning: Conditioning, shape: tuple[int, ...]) -> None:
        config = self.config
        check_states(conditioning, shape[0], config.text_width)
        check_guidance(conditioning, guided=False)
        check_picture_states(conditioning, config.picture_width, config.picture_positions)
        check_clip(shape, config.latent_channels, PATCH)
        longest = int(conditioning.lengths.max())
        if longest > TEXT_TOKENS:
            raise ValueError(f"text has {longest} tokens; this model reads up to {TEXT_TOKENS}")
        self._check_references([tuple(each.shape) for each in conditioning.references], shape)

    def _check_references(self, found: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> None:
        rows, _, frames, *sides = shape
        beside = self.config.beside_channels
        if beside and found != [(rows, beside, frames, *sides)]:
            wanted = (rows, beside, frames, *sides)
            raise ValueError(f"references are of shapes {found}; this model reads one of {wanted} beside the latents")
        if not beside:
            check_first_frames(found, shape)


def filled_with_zeros(conditioning: Conditioning, count: int) -> Tensor:
    """Text states [B, count, Dt]: zeros after each row's own."""
    states = conditioning.states[:, :count]
    is_text = torch.arange(states.shape[1], device=states.device) < conditioning.lengths.to(states.device)[:, None]
    states = torch.where(is_text[..., None], states, states.new_zeros(()))
    return functional.pad(states, (0, 0, 0, count - states.shape[1]))
