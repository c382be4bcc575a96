"""FLUX.1 (dev, schnell): joint two-stream blocks, then single parallel ones over all tokens.

Flow matching: the network gives the slope dx/dsigma = noise - data. Everything but the tokens of the latents is
prepared once per run, with all modulations: they depend on time, guidance and the pooled text alone, so their weights
(27 % of all) are read by `prepare` and never by a step.

Source: diffusers' FluxTransformer2DModel and Black Forest Labs' flux repository.

Legend: B rows, E evaluations, C latent channels, h w latent cells, P = 2 cells per token side, N = h w / P^2 picture
tokens, Lt text tokens, Dt text width, Dp pooled width, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.attention.base import FULL, AttentionMask, AttentionSelector
from ..core.blocks.joint import JointBlock, JointConfig
from ..core.blocks.parallel import ParallelBlock
from ..core.key_map import KeyMap, Layout, Part, Rule, Share
from ..core.modulation import Modulation, ShiftScale, ShiftScaleGate
from ..core.norms import LayerNorm
from ..core.rotary import Rotary, RotaryConfig, grid_positions, rotary_table
from ..core.stream import BlockInputs, NoCache, Runner, Stream, run_blocks
from ..core.weight_source import WeightSource
from ..schedulers.base import Point
from .base import Conditioning
from .embedding import SINUSOID_WIDTH, Embedder, sinusoid
from .patches import patchify, unpatchify

HOISTED = ("modulation.", "single_modulation.")
"""What the names of weights that only `prepare` uses begin with."""
PATCH = 2
TIME_SCALE = 1000.0
NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class FluxConfig:
    """Sizes. `latent_channels` is C (a token holds C P^2 values); `guided`: whether there is a guidance embedding."""

    latent_channels: int = 16
    layers: int = 19
    single_layers: int = 38
    heads: int = 24
    head_width: int = 128
    text_width: int = 4096
    pooled_width: int = 768
    rotary_axes: tuple[int, int, int] = (16, 56, 56)
    guided: bool = False

    @property
    def width(self) -> int:
        """D."""
        return self.heads * self.head_width

    def block(self) -> JointConfig:
        """The blocks' config."""
        return JointConfig(
            heads=self.heads, head_width=self.head_width, hidden=4 * self.width, norm_eps=NORM_EPS, qk_norm=True
        )

    def rotary(self) -> RotaryConfig:
        """The rotary embedding's config."""
        return RotaryConfig(axes=self.rotary_axes, pairing="interleaved", dtype="float64")

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "FluxConfig":
        """From the entries of diffusers' `transformer/config.json`; what is missing has diffusers' default.

        Raises:
            ValueError: sizes of the wrong type, or a kind of FLUX.1 with other inputs (Fill, Control) than this one.
        """
        default = cls()
        channels = _size(entries, "in_channels", 64)
        if entries.get("patch_size", 1) != 1 or entries.get("out_channels", None) not in (None, channels):
            raise ValueError(
                f"transformer/config.json has in_channels {channels}, out_channels {entries.get('out_channels')}, "
                f"patch_size {entries.get('patch_size')}; only FLUX.1 with outputs like its inputs can be used"
            )
        if channels % PATCH**2:
            raise ValueError(f"in_channels is {channels}; it must be a multiple of {PATCH**2}")
        head_width = _size(entries, "attention_head_dim", default.head_width)
        guided: object = entries.get("guidance_embeds", False)
        if not isinstance(guided, bool):
            raise ValueError(f"transformer/config.json: guidance_embeds is {guided!r}; it must be true or false")
        return cls(
            latent_channels=channels // PATCH**2,
            layers=_size(entries, "num_layers", default.layers),
            single_layers=_size(entries, "num_single_layers", default.single_layers),
            heads=_size(entries, "num_attention_heads", default.heads),
            head_width=head_width,
            text_width=_size(entries, "joint_attention_dim", default.text_width),
            pooled_width=_size(entries, "pooled_projection_dim", default.pooled_width),
            rotary_axes=_axes(entries.get("axes_dims_rope", default.rotary_axes), head_width),
            guided=guided,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class FluxPrepared:
    """All that one run needs and that does not depend on the latents.

    `modulation[e]` are evaluation e's modulations of the joint blocks, `single_modulation[e]` those of the parallel
    ones, `final[e]` that of the output layer; `places[index]` finds e by a point's index.
    """

    context: Tensor  # [B, Lt, D]
    rotary: Rotary
    mask: AttentionMask
    attention: AttentionSelector
    runner: Runner
    modulation: Sequence[Sequence[Sequence[Modulation]]]
    single_modulation: Sequence[Sequence[Sequence[Modulation]]]
    final: Sequence[ShiftScale]
    places: Mapping[int, int]

    def inputs(self, modulation: Sequence[Sequence[Modulation]]) -> BlockInputs:
        """What blocks with these modulations read."""
        return BlockInputs(rotary=self.rotary, mask=self.mask, attention=self.attention, modulation=modulation)


class FluxDenoiser(nn.Module):
    """See the module's first lines; implements `Denoiser`. Its conditioning has `pooled` text, and `guidance` where the
    model is guided. Weights of modulations that are on the meta device are read from `source` by each `prepare`."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.config = config
        self.source: WeightSource | None = None
        width, token = config.width, config.latent_channels * PATCH**2
        self.image_in = nn.Linear(token, width)
        self.text_in = nn.Linear(config.text_width, width)
        self.time_embed = Embedder(SINUSOID_WIDTH, width)
        self.guidance_embed = Embedder(SINUSOID_WIDTH, width) if config.guided else None
        self.pooled_embed = Embedder(config.pooled_width, width)
        self.blocks = nn.ModuleList(JointBlock(config.block()) for _ in range(config.layers))
        self.single_blocks = nn.ModuleList(ParallelBlock(config.block()) for _ in range(config.single_layers))
        self.modulation = nn.ModuleList(nn.Linear(width, 12 * width) for _ in range(config.layers))
        self.single_modulation = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(config.single_layers))
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
    ) -> FluxPrepared:
        """Everything for latents of `shape` [B, C, 1, h, w] at these points.

        Raises:
            ValueError: latents or conditioning of a shape or kind that the model does not take.
        """
        self._check_fits(conditioning, shape)
        h = functional.silu(self.embed(conditioning, evaluations))  # [E, B, D]
        joint = [_gated(self._projected(f"modulation.{i}", h), 4) for i in range(self.config.layers)]
        single = [_gated(self._projected(f"single_modulation.{i}", h), 1) for i in range(self.config.single_layers)]
        shift, scale = self.final_modulation(h)[:, :, None].chunk(2, dim=-1)
        return FluxPrepared(
            context=self.text_in(conditioning.states.to(self.text_in.weight.dtype)),
            rotary=self.rotary_tables(shape, conditioning.states),
            mask=FULL,
            attention=attention,
            runner=runner,
            modulation=[[block[e] for block in joint] for e in range(len(evaluations))],
            single_modulation=[[block[e] for block in single] for e in range(len(evaluations))],
            final=[ShiftScale(shift=a, scale=b) for a, b in zip(shift, scale, strict=True)],
            places={point.index: e for e, point in enumerate(evaluations)},
        )

    def slope(self, x: Tensor, prepared: FluxPrepared, point: Point) -> Tensor:
        """noise - data, float32 [B, C, 1, h, w], at one of the points that were prepared."""
        e = prepared.places[point.index]
        tokens = self.image_in(patchify(x, PATCH).to(prepared.context.dtype))
        stream = Stream(x=tokens, context=prepared.context)
        stream = prepared.runner([*self.blocks], stream, prepared.inputs(prepared.modulation[e]), NoCache())
        assert stream.context is not None
        stream = Stream(x=torch.cat((stream.x, stream.context), dim=1))
        inputs = prepared.inputs(prepared.single_modulation[e])
        stream = prepared.runner([*self.single_blocks], stream, inputs, NoCache())
        h = prepared.final[e].before(self.final_norm(stream.x[:, : tokens.shape[1]]))
        return unpatchify(self.output(h), x.shape, PATCH).float()

    def embed(self, conditioning: Conditioning, evaluations: Sequence[Point]) -> Tensor:
        """What all modulations come from: time, guidance and pooled text in one vector, [E, B, D]."""
        assert conditioning.pooled is not None
        device = conditioning.pooled.device
        times = torch.tensor([point.time for point in evaluations], dtype=torch.float32, device=device)
        times = times * TIME_SCALE / TIME_SCALE  # as the reference's rounding goes: an angle of 1000 shows its last bit
        vector = self.time_embed(sinusoid(times * TIME_SCALE))[:, None]
        if self.guidance_embed is not None:
            assert conditioning.guidance is not None
            guidance = torch.tensor([conditioning.guidance], dtype=torch.float32, device=device)
            vector = vector + self.guidance_embed(sinusoid(guidance * TIME_SCALE))
        return vector + self.pooled_embed(conditioning.pooled)

    def _projected(self, name: str, h: Tensor) -> Tensor:
        """A modulation's linear layer of h [E, B, D]; where it is not resident its weights are read for this."""
        linear = self.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        if not linear.weight.is_meta:
            return linear(h)
        if self.source is None:
            raise ValueError(f"{name} has no weights, and the denoiser no source to read them from")
        weight, bias = (
            self.source.read(f"{name}.{leaf}", dtype=h.dtype, device=h.device) for leaf in ("weight", "bias")
        )
        return functional.linear(h, weight, bias)

    def rotary_tables(self, shape: tuple[int, ...], states: Tensor) -> Rotary:
        """Tables for picture tokens, at (0, row, column), then text tokens, all at (0, 0, 0)."""
        grid = grid_positions((1, shape[3] // PATCH, shape[4] // PATCH))
        text = grid.new_zeros(states.shape[1], 3)
        return rotary_table(self.config.rotary(), torch.cat((grid, text)).to(states.device))

    def _check_fits(self, conditioning: Conditioning, shape: tuple[int, ...]) -> None:
        config, states, pooled = self.config, conditioning.states, conditioning.pooled
        if states.shape[2] != config.text_width:
            raise ValueError(f"text states are {states.shape[2]} wide; this model reads states of {config.text_width}")
        if pooled is None or pooled.shape[1] != config.pooled_width:
            found = "none" if pooled is None else f"of width {pooled.shape[1]}"
            raise ValueError(f"pooled text is {found}; this model reads one of width {config.pooled_width}")
        if config.guided != (conditioning.guidance is not None):
            needs = "needs a guidance value" if config.guided else "takes no guidance value"
            raise ValueError(f"guidance is {conditioning.guidance}; this model {needs}")
        if states.shape[0] != shape[0]:
            raise ValueError(f"text states have {states.shape[0]} rows for {shape[0]} rows of latents")
        if not bool((conditioning.lengths == states.shape[1]).all()):
            raise ValueError("text states are padded; this model attends to every token that it is given")
        if shape[1] != config.latent_channels or shape[2] != 1 or shape[3] % PATCH or shape[4] % PATCH:
            taken = f"{config.latent_channels} channels, one frame, sides in steps of {PATCH}"
            raise ValueError(f"latents are {shape}; this model takes {taken}")


def _gated(table: Tensor, count: int) -> list[list[ShiftScaleGate]]:
    """Per evaluation, the `count` modulations in a table [E, B, 3 D count]; tensors [B, 1, D]."""
    parts = table[:, :, None].chunk(3 * count, dim=-1)
    return [
        [
            ShiftScaleGate(shift=parts[3 * n][e], scale=parts[3 * n + 1][e], gate=parts[3 * n + 2][e])
            for n in range(count)
        ]
        for e in range(len(table))
    ]


def _axes(value: object, head_width: int) -> tuple[int, int, int]:
    """Three even widths that make up a head."""
    match value:
        case (int(a), int(b), int(c)) if a + b + c == head_width and all(n > 0 and n % 2 == 0 for n in (a, b, c)):
            return (a, b, c)
        case _:
            wanted = f"three even widths that add up to attention_head_dim {head_width}"
            raise ValueError(f"transformer/config.json: axes_dims_rope is {value!r}; it must be {wanted}")


def _size(entries: Mapping[str, Any], name: str, default: int) -> int:
    value = entries.get(name, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"transformer/config.json: {name} is {value!r}; it must be a whole number over 0")
    return value


def flux_key_map() -> KeyMap:
    """diffusers' layout, and Black Forest Labs' own, as ComfyUI saves it too."""
    return KeyMap((_diffusers(), _original()))


def _diffusers() -> Layout:
    block, single = "transformer_blocks.{i}.", "single_transformer_blocks.{i}."
    rules = [
        Rule("x_embedder.{leaf}", "image_in.{leaf}"),
        Rule("context_embedder.{leaf}", "text_in.{leaf}"),
        *_embedders("time_text_embed.{}.linear_1.{{leaf}}", "time_text_embed.{}.linear_2.{{leaf}}", _DIFFUSERS_NAMES),
        Rule((f"{block}norm1.linear.{{leaf}}", f"{block}norm1_context.linear.{{leaf}}"), "modulation.{i}.{leaf}"),
        *_diffusers_stream("x", "to_{}", "norm_{}", "to_out.0", "ff"),
        *_diffusers_stream("context", "add_{}_proj", "norm_added_{}", "to_add_out", "ff_context"),
        Rule(f"{single}norm.linear.{{leaf}}", "single_modulation.{i}.{leaf}"),
        Rule(
            (*(f"{single}attn.to_{n}.{{leaf}}" for n in "qkv"), f"{single}proj_mlp.{{leaf}}"),
            "single_blocks.{i}.inner.{leaf}",
        ),
        Rule(f"{single}attn.norm_q.weight", "single_blocks.{i}.query_norm.weight"),
        Rule(f"{single}attn.norm_k.weight", "single_blocks.{i}.key_norm.weight"),
        Rule(f"{single}proj_out.{{leaf}}", "single_blocks.{i}.output.{leaf}"),
        Rule(  # scale before shift there
            (Part("norm_out.linear.{leaf}", (Share(1, 2),)), Part("norm_out.linear.{leaf}", (Share(0, 2),))),
            "final_modulation.{leaf}",
        ),
        Rule("proj_out.{leaf}", "output.{leaf}"),
    ]
    return Layout("diffusers", tuple(rules))


_DIFFUSERS_NAMES = {
    "time_embed": "timestep_embedder",
    "guidance_embed": "guidance_embedder",
    "pooled_embed": "text_embedder",
}
_ORIGINAL_NAMES = {"time_embed": "time_in", "guidance_embed": "guidance_in", "pooled_embed": "vector_in"}


def _embedders(inner: str, outer: str, names: Mapping[str, str]) -> list[Rule]:
    """The rules of the embedders; `inner` and `outer` are their keys with a place for the name."""
    return [
        Rule(source.format(name), f"{ours}.{layer}.{{leaf}}")
        for ours, name in names.items()
        for source, layer in ((inner, "inner"), (outer, "outer"))
    ]


def _diffusers_stream(ours: str, projection: str, norm: str, output: str, mlp: str) -> list[Rule]:
    """The rules of one stream of the joint blocks."""
    block, target = "transformer_blocks.{i}.", f"blocks.{{i}}.{ours}."
    return [
        Rule(tuple(f"{block}attn.{projection.format(n)}.{{leaf}}" for n in "qkv"), f"{target}qkv.{{leaf}}"),
        Rule(f"{block}attn.{norm.format('q')}.weight", f"{target}query_norm.weight"),
        Rule(f"{block}attn.{norm.format('k')}.weight", f"{target}key_norm.weight"),
        Rule(f"{block}attn.{output}.{{leaf}}", f"{target}output.{{leaf}}"),
        Rule(f"{block}{mlp}.net.0.proj.{{leaf}}", f"{target}mlp.up.{{leaf}}"),
        Rule(f"{block}{mlp}.net.2.{{leaf}}", f"{target}mlp.down.{{leaf}}"),
    ]


def _original() -> Layout:
    block, single = "double_blocks.{i}.", "single_blocks.{i}."
    rules = [
        Rule("img_in.{leaf}", "image_in.{leaf}"),
        Rule("txt_in.{leaf}", "text_in.{leaf}"),
        *_embedders("{}.in_layer.{{leaf}}", "{}.out_layer.{{leaf}}", _ORIGINAL_NAMES),
        Rule((f"{block}img_mod.lin.{{leaf}}", f"{block}txt_mod.lin.{{leaf}}"), "modulation.{i}.{leaf}"),
        *_original_stream("x", "img"),
        *_original_stream("context", "txt"),
        Rule(f"{single}modulation.lin.{{leaf}}", "single_modulation.{i}.{leaf}"),
        Rule(f"{single}linear1.{{leaf}}", "single_blocks.{i}.inner.{leaf}"),
        Rule(f"{single}norm.query_norm.scale", "single_blocks.{i}.query_norm.weight"),
        Rule(f"{single}norm.key_norm.scale", "single_blocks.{i}.key_norm.weight"),
        Rule(f"{single}linear2.{{leaf}}", "single_blocks.{i}.output.{leaf}"),
        Rule("final_layer.adaLN_modulation.1.{leaf}", "final_modulation.{leaf}"),
        Rule("final_layer.linear.{leaf}", "output.{leaf}"),
    ]
    return Layout("original", tuple(rules), prefixes=("", "model.diffusion_model."))


def _original_stream(ours: str, theirs: str) -> list[Rule]:
    block, target = f"double_blocks.{{i}}.{theirs}_", f"blocks.{{i}}.{ours}."
    return [
        Rule(f"{block}attn.qkv.{{leaf}}", f"{target}qkv.{{leaf}}"),
        Rule(f"{block}attn.norm.query_norm.scale", f"{target}query_norm.weight"),
        Rule(f"{block}attn.norm.key_norm.scale", f"{target}key_norm.weight"),
        Rule(f"{block}attn.proj.{{leaf}}", f"{target}output.{{leaf}}"),
        Rule(f"{block}mlp.0.{{leaf}}", f"{target}mlp.up.{{leaf}}"),
        Rule(f"{block}mlp.2.{{leaf}}", f"{target}mlp.down.{{leaf}}"),
    ]
