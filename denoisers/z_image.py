"""Z-Image (base, Turbo): one stream of picture tokens and text tokens through sandwich-normed self-attention blocks.

Text passes through unmodulated blocks once per run; picture tokens through modulated blocks of their own; then both
share every block. Each kind is filled up to a multiple of 32 tokens with a learned one, which is attended. All
modulations depend on the time alone: their weights are read by `prepare` and never by a step.

Flow matching: the network is told the time 1 - sigma (1: clean) and gives data - noise, the negated slope.

Source: diffusers' ZImageTransformer2DModel and Tongyi-MAI's Z-Image repository.

Legend: B rows, E evaluations, C latent channels, h w latent cells, P = 2 cells per token side, N = h w / P^2 picture
tokens, N' the same filled up, Lt text tokens, L' the same filled up, Dt text width, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.attention.base import FULL, AttentionMask, AttentionSelector
from ..core.blocks.decoder import DecoderBlock, DecoderConfig
from ..core.modulation import Modulation, ScaleGate
from ..core.norms import LayerNorm, RMSNorm
from ..core.rotary import Rotary, RotaryConfig, grid_positions, rotary_table
from ..core.saving import Component
from ..core.stream import BlockInputs, NoCache, Runner, Stream, run_blocks, walk
from ..schedulers.base import Point
from .base import Conditioning
from .embedding import SINUSOID_WIDTH, Embedder, sinusoid
from .entries import FILE, number, rotary_axes, size, switch
from .fitting import check_cells, check_states, text_mask
from .hoisting import HoistingModule
from .patches import patchify_channels_last, unpatchify_channels_last
from .saving import in_diffusers_layout
from .shapes import Marks, Shapes, rotary_share
from .z_image_keys import z_image_key_map

PATCH = 2
TOKENS_MULTIPLE = 32
TIME_WIDTH, TIME_HIDDEN = 256, 1024
TIMES = 1000.0  # the reference's clock counts in thousandths
HEAD_NORM_EPS = 1e-5
FINAL_NORM_EPS = 1e-6
_NAMES = ("x_pad_token", "cap_pad_token", "cap_embedder.1.weight")
MARKS = Marks(((*_NAMES, "noise_refiner.0.attention.qkv.weight"), (*_NAMES, "all_x_embedder.2-1.weight")))


@dataclass(frozen=True, kw_only=True)
class ZImageConfig:
    """Sizes. `rotary_lengths` are the positions there are for (text position or picture, row, column)."""

    latent_channels: int = 16
    width: int = 3840
    layers: int = 30
    refiner_layers: int = 2
    heads: int = 30
    text_width: int = 2560
    norm_eps: float = 1e-5
    qk_norm: bool = True
    rotary_axes: tuple[int, int, int] = (32, 48, 48)
    rotary_lengths: tuple[int, int, int] = (1024, 512, 512)
    rotary_theta: float = 256.0
    time_scale: float = 1000.0

    @property
    def time_width(self) -> int:
        """Of the vector that all modulations come from."""
        return min(self.width, TIME_WIDTH)

    @property
    def most_cells(self) -> int:
        """Latent cells a side of the largest picture."""
        return PATCH * min(self.rotary_lengths[1:])

    @property
    def most_tokens(self) -> int:
        """Of a text, once it is filled up: the picture stands after it."""
        return (self.rotary_lengths[0] - 2) // TOKENS_MULTIPLE * TOKENS_MULTIPLE

    def block(self) -> DecoderConfig:
        """The blocks' config."""
        return DecoderConfig(
            width=self.width,
            heads=self.heads,
            kv_heads=self.heads,
            head_width=self.width // self.heads,
            hidden=int(self.width / 3 * 8),
            norm_eps=self.norm_eps,
            qk_norm=self.qk_norm,
            qk_norm_eps=HEAD_NORM_EPS,
            sandwich=True,
        )

    def rotary(self) -> RotaryConfig:
        """The rotary embedding's config."""
        return RotaryConfig(axes=self.rotary_axes, theta=self.rotary_theta, pairing="interleaved", dtype="float64")

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "ZImageConfig":
        """From the entries of diffusers' `transformer/config.json`; what is missing has diffusers' default.

        `n_kv_heads` is not read, as the reference does not: there are as many as heads.

        Raises:
            ValueError: sizes of the wrong type or that do not fit, or a kind of Z-Image (Omni) with other inputs.
        """
        default = cls()
        for name, wanted in (("all_patch_size", [PATCH]), ("all_f_patch_size", [1]), ("siglip_feat_dim", None)):
            if _listed(entries.get(name, wanted)) != wanted:
                raise ValueError(f"{FILE}: {name} is {entries[name]!r}; only Z-Image with {wanted} can be used")
        width = size(entries, "dim", default.width)
        heads = size(entries, "n_heads", default.heads)
        if width % heads:
            raise ValueError(f"{FILE}: dim is {width}; it must be a multiple of n_heads, {heads}")
        return cls(
            latent_channels=size(entries, "in_channels", default.latent_channels),
            width=width,
            layers=size(entries, "n_layers", default.layers),
            refiner_layers=size(entries, "n_refiner_layers", default.refiner_layers),
            heads=heads,
            text_width=size(entries, "cap_feat_dim", default.text_width),
            norm_eps=number(entries, "norm_eps", default.norm_eps),
            qk_norm=switch(entries, "qk_norm", default.qk_norm),
            rotary_axes=rotary_axes(entries, default.rotary_axes, width // heads, "axes_dims"),
            rotary_lengths=_lengths(entries.get("axes_lens", default.rotary_lengths)),
            rotary_theta=number(entries, "rope_theta", default.rotary_theta),
            time_scale=number(entries, "t_scale", default.time_scale),
        )

    def entries(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        return {
            "all_patch_size": [PATCH],
            "all_f_patch_size": [1],
            "in_channels": self.latent_channels,
            "dim": self.width,
            "n_layers": self.layers,
            "n_refiner_layers": self.refiner_layers,
            "n_heads": self.heads,
            "n_kv_heads": self.heads,
            "norm_eps": self.norm_eps,
            "qk_norm": self.qk_norm,
            "cap_feat_dim": self.text_width,
            "rope_theta": self.rotary_theta,
            "t_scale": self.time_scale,
            "axes_dims": list(self.rotary_axes),
            "axes_lens": list(self.rotary_lengths),
        }

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "ZImageConfig":
        """From the tensors of a checkpoint in one of the layouts of `z_image_key_map`.

        Raises:
            ValueError: shapes of another model.
        """
        default = cls()
        width, inputs = shapes.of("x_embedder.weight", "all_x_embedder.2-1.weight")
        outputs, _ = shapes.of("final_layer.linear.weight", "all_final_layer.2-1.linear.weight")
        if inputs != outputs or inputs % PATCH**2:
            raise ValueError(f"tokens have {inputs} values going in and {outputs} coming out; Z-Image's are alike")
        names = ("layers.0.attention.q_norm.weight", "layers.0.attention.norm_q.weight")
        (head_width,) = shapes.of(*names, axes=1)
        return cls(
            latent_channels=inputs // PATCH**2,
            width=width,
            layers=shapes.count("layers."),
            refiner_layers=shapes.count("noise_refiner."),
            heads=width // head_width,
            text_width=shapes.of("cap_embedder.1.weight")[1],
            rotary_axes=rotary_share(default.rotary_axes, head_width),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ZImagePrepared:
    """All that one run needs and that does not depend on the latents.

    `text` are the refined text tokens, `padding` the picture tokens that fill up. `image[e]` is what the picture's own
    blocks read at evaluation e, `joint[e]` what the shared ones do, `final[e]` the factor of the output layer's input;
    `places[index]` finds e by a point's index.
    """

    text: Tensor  # [B, L', D]
    padding: Tensor  # [B, N' - N, D]
    runner: Runner
    image: Sequence[BlockInputs]
    joint: Sequence[BlockInputs]
    final: Sequence[Tensor]  # [1, 1, D] each
    places: Mapping[int, int]


class ZImageDenoiser(HoistingModule):
    """See the module's first lines; implements `Denoiser`. Its conditioning's rows may have different lengths."""

    hoisted: ClassVar[tuple[str, ...]] = ("modulation.", "image_modulation.")
    walked: ClassVar[tuple[str, ...]] = ("text_blocks", "image_blocks", "blocks")

    def __init__(self, config: ZImageConfig) -> None:
        super().__init__()
        self.config = config
        width, token, block = config.width, config.latent_channels * PATCH**2, config.block()
        self.image_in = nn.Linear(token, width)
        self.image_padding = nn.Parameter(torch.zeros(1, width))
        self.text_norm = RMSNorm(config.text_width, eps=config.norm_eps)
        self.text_in = nn.Linear(config.text_width, width)
        self.text_padding = nn.Parameter(torch.zeros(1, width))
        self.time_embed = Embedder(SINUSOID_WIDTH, config.time_width, hidden=TIME_HIDDEN)
        self.image_blocks = nn.ModuleList(DecoderBlock(block) for _ in range(config.refiner_layers))
        self.text_blocks = nn.ModuleList(DecoderBlock(block) for _ in range(config.refiner_layers))
        self.blocks = nn.ModuleList(DecoderBlock(block) for _ in range(config.layers))
        self.image_modulation = self._modulations(config.refiner_layers)
        self.modulation = self._modulations(config.layers)
        self.final_norm = LayerNorm(width, eps=FINAL_NORM_EPS, affine=False)
        self.final_modulation = nn.Linear(config.time_width, width)
        self.output = nn.Linear(width, token)

    def prepare(
        self,
        conditioning: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> ZImagePrepared:
        """Everything for latents of `shape` [B, C, 1, h, w] at these points.

        Raises:
            ValueError: latents or conditioning of a shape or kind that the model does not take.
        """
        self._check_fits(conditioning, shape)
        num_image = (shape[3] // PATCH) * (shape[4] // PATCH)
        num_filled, lengths = filled_up(num_image), filled_up(conditioning.lengths)
        num_text, layers, refiners = int(lengths.max()), self.config.layers, self.config.refiner_layers
        rotary = self.rotary_tables(shape, lengths)
        image_rotary, text_rotary = _split(rotary, num_filled)
        h = self.embed_times(evaluations, conditioning.states.device)
        text_inputs = BlockInputs(rotary=text_rotary, mask=text_mask(lengths, num_text, 0), attention=attention)
        joint_mask = text_mask(lengths, num_text, num_filled)
        return ZImagePrepared(
            text=self.refine_text(conditioning, lengths, text_inputs),
            padding=self.image_padding.expand(shape[0], num_filled - num_image, -1),
            runner=runner,
            image=self._inputs("image_modulation", refiners, h, image_rotary, FULL, attention),
            joint=self._inputs("modulation", layers, h, rotary, joint_mask, attention),
            final=[*(1 + self.final_modulation(functional.silu(h)))[:, None, None].unbind()],
            places={point.index: e for e, point in enumerate(evaluations)},
        )

    def slope(self, x: Tensor, prepared: ZImagePrepared, point: Point) -> Tensor:
        """noise - data, float32 [B, C, 1, h, w], at one of the points that were prepared."""
        e, text = prepared.places[point.index], prepared.text
        tokens = self.image_in(patchify_channels_last(x, PATCH).to(text.dtype))
        num_image = tokens.shape[1]
        stream = Stream(x=torch.cat((tokens, prepared.padding), dim=1))
        stream = walk(prepared.runner, [*self.image_blocks], stream, prepared.image[e], NoCache())
        stream = Stream(x=torch.cat((stream.x, text), dim=1))
        stream = walk(prepared.runner, [*self.blocks], stream, prepared.joint[e], NoCache())
        h = self.final_norm(stream.x[:, :num_image]) * prepared.final[e]
        return -unpatchify_channels_last(self.output(h), x.shape, PATCH).float()

    def component(self) -> Component:
        """See `Saveable`."""
        return in_diffusers_layout("ZImageTransformer2DModel", self.config.entries(), self.weights(), z_image_key_map())

    def embed_times(self, evaluations: Sequence[Point], device: torch.device) -> Tensor:
        """What all modulations come from, [E, time width]."""
        times = torch.tensor([point.time for point in evaluations], dtype=torch.float32, device=device)
        times = (TIMES - times * TIMES) / TIMES  # as the reference's rounding goes: an angle of 1000 shows its last bit
        return self.time_embed(sinusoid(times * self.config.time_scale))

    def refine_text(self, conditioning: Conditioning, lengths: Tensor, inputs: BlockInputs) -> Tensor:
        """Text tokens [B, L', D]: projected, filled up to `lengths` [B], and through the text's own blocks."""
        h = self.text_in(self.text_norm(conditioning.states.to(self.text_in.weight.dtype)))
        h = functional.pad(h, (0, 0, 0, int(lengths.max()) - h.shape[1]))
        index = torch.arange(h.shape[1], device=h.device)
        is_text = index < conditioning.lengths.to(h.device)[:, None]
        h = torch.where(is_text[..., None], h, self.text_padding)
        return walk(self.runner(run_blocks), [*self.text_blocks], Stream(x=h), inputs, NoCache()).x

    def rotary_tables(self, shape: tuple[int, ...], lengths: Tensor) -> Rotary:
        """Tables for N' picture tokens then L' text tokens: text n stands at (n + 1, 0, 0), the picture after all the
        text, at (L' + 1, row, column), what fills it up at (0, 0, 0); one row where all have one length."""
        own = lengths[:1] if bool((lengths == lengths[0]).all()) else lengths
        grid = grid_positions((1, shape[3] // PATCH, shape[4] // PATCH)).to(lengths.device)
        start = functional.pad(own[:, None, None] + 1, (0, 2))  # [B or 1, 1, 3]
        image = functional.pad(grid + start, (0, 0, 0, filled_up(len(grid)) - len(grid)))
        text = functional.pad(torch.arange(1, int(lengths.max()) + 1, device=lengths.device)[:, None], (0, 2))
        return rotary_table(self.config.rotary(), torch.cat((image, text.expand(len(own), -1, -1)), dim=1))

    def _inputs(
        self, name: str, count: int, h: Tensor, rotary: Rotary, mask: AttentionMask, attention: AttentionSelector
    ) -> list[BlockInputs]:
        """What a stack of `count` blocks reads at each evaluation; `name` is that of its modulations."""
        tables = [_scales_and_gates(self.projected(f"{name}.{i}", h)) for i in range(count)]
        return [
            BlockInputs(rotary=rotary, mask=mask, attention=attention, modulation=[table[e] for table in tables])
            for e in range(len(h))
        ]

    def _modulations(self, count: int) -> nn.ModuleList:
        config = self.config
        return nn.ModuleList(nn.Linear(config.time_width, 4 * config.width) for _ in range(count))

    def _check_fits(self, conditioning: Conditioning, shape: tuple[int, ...]) -> None:
        config = self.config
        check_states(conditioning, shape[0], config.text_width)
        if conditioning.guidance is not None or conditioning.pooled is not None or conditioning.references:
            raise ValueError("conditioning holds a guidance value, pooled text or references; this model takes none")
        shortest, longest = (int(each) for each in conditioning.lengths.aminmax())
        if shortest < 1 or longest > config.most_tokens:
            taken = f"1 to {config.most_tokens}"
            raise ValueError(f"text has {shortest} to {longest} tokens a row; this model takes {taken}")
        check_cells(shape, config.latent_channels, PATCH)
        most_rows, most_columns = (PATCH * length for length in config.rotary_lengths[1:])
        if shape[3] > most_rows or shape[4] > most_columns:
            raise ValueError(f"latents are {shape}; this model has positions for {most_rows} x {most_columns} cells")


_Count = TypeVar("_Count", int, Tensor)


def filled_up(count: _Count) -> _Count:
    """The next multiple of 32, of a number or of each in a tensor."""
    return count + -count % TOKENS_MULTIPLE


def _split(rotary: Rotary, count: int) -> tuple[Rotary, Rotary]:
    """The tables of the first `count` tokens, and of the others."""
    first, other = (
        Rotary(cos=rotary.cos[:, part], sin=rotary.sin[:, part], pairing=rotary.pairing)
        for part in (slice(count), slice(count, None))
    )
    return first, other


def _scales_and_gates(table: Tensor) -> list[list[Modulation]]:
    """Per evaluation, the two modulations in a table [E, 4 D]; tensors [1, 1, D]."""
    scale_1, gate_1, scale_2, gate_2 = table[:, None, None].chunk(4, dim=-1)
    return [
        [ScaleGate(scale=scale_1[e], gate=gate_1[e].tanh()), ScaleGate(scale=scale_2[e], gate=gate_2[e].tanh())]
        for e in range(len(table))
    ]


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType]


def _lengths(value: object) -> tuple[int, int, int]:
    match value:
        case [int(a), int(b), int(c)] if min(a, b, c) > 0:
            return (a, b, c)
        case _:
            raise ValueError(f"{FILE}: axes_lens is {value!r}; it must be three whole numbers over 0")
