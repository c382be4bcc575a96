"""FLUX.1 (dev, schnell, Kontext): joint two-stream blocks, then single parallel ones over all tokens.

Flow matching: the network gives the slope dx/dsigma = noise - data. Everything but the tokens of the latents is
prepared once per run, with all modulations: they depend on time, guidance and the pooled text alone, so their weights
(27 % of all) are read by `prepare` and never by a step. Tokens of a picture to look at (Kontext) go after those of the
picture that is made, a frame later.

Source: diffusers' FluxTransformer2DModel and Black Forest Labs' flux repository.

Legend: B rows, E evaluations, C latent channels, h w latent cells, P = 2 cells per token side, N = h w / P^2 picture
tokens, R tokens of a reference, Lt text tokens, Dt text width, Dp pooled width, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.attention.base import FULL
from ..core.blocks.joint import JointBlock, JointConfig
from ..core.blocks.parallel import ParallelBlock
from ..core.key_map import KeyMap, Layout, Rule
from ..core.modulation import ShiftScaleGate
from ..core.norms import LayerNorm
from ..core.rotary import Rotary, RotaryConfig, grid_positions, rotary_table
from ..core.saving import Component
from ..schedulers.base import Point
from .base import Conditioning
from .embedding import SINUSOID_WIDTH, TIME_SCALE, Embedder, sinusoid, thousandfold
from .entries import rotary_axes, size, switch
from .fitting import are_as_long, check_cells, check_guidance, check_pooled, check_states, check_unpadded
from .guidance import Run
from .hoisting import gated, ungated
from .keys import final_layer, joint_stream
from .pairing import PairingModule
from .patches import patchify, unpatchify
from .saving import in_diffusers_layout
from .shapes import Marks, Shapes, rotary_share
from .stages import StagesPrepared, StagesTold, run_stages

HOISTED = ("modulation.", "single_modulation.")
"""What the names of weights that only `prepare` uses begin with."""
PATCH = 2
NORM_EPS = 1e-6
MARKS = Marks(
    (
        (
            "img_in.weight",
            "vector_in.in_layer.weight",
            "double_blocks.0.img_mod.lin.weight",
            "single_blocks.0.linear1.weight",
        ),
        (
            "x_embedder.weight",
            "time_text_embed.text_embedder.linear_1.weight",
            "transformer_blocks.0.norm1_context.linear.weight",
            "single_transformer_blocks.0.proj_mlp.weight",
        ),
    )
)


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
        channels = size(entries, "in_channels", 64)
        if entries.get("patch_size", 1) != 1 or entries.get("out_channels", None) not in (None, channels):
            raise ValueError(
                f"transformer/config.json has in_channels {channels}, out_channels {entries.get('out_channels')}, "
                f"patch_size {entries.get('patch_size')}; only FLUX.1 with outputs like its inputs can be used"
            )
        if channels % PATCH**2:
            raise ValueError(f"in_channels is {channels}; it must be a multiple of {PATCH**2}")
        head_width = size(entries, "attention_head_dim", default.head_width)
        return cls(
            latent_channels=channels // PATCH**2,
            layers=size(entries, "num_layers", default.layers),
            single_layers=size(entries, "num_single_layers", default.single_layers),
            heads=size(entries, "num_attention_heads", default.heads),
            head_width=head_width,
            text_width=size(entries, "joint_attention_dim", default.text_width),
            pooled_width=size(entries, "pooled_projection_dim", default.pooled_width),
            rotary_axes=rotary_axes(entries, default.rotary_axes, head_width),
            guided=switch(entries, "guidance_embeds"),
        )

    def entries(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        return {
            "patch_size": 1,
            "in_channels": self.latent_channels * PATCH**2,
            "num_layers": self.layers,
            "num_single_layers": self.single_layers,
            "attention_head_dim": self.head_width,
            "num_attention_heads": self.heads,
            "joint_attention_dim": self.text_width,
            "pooled_projection_dim": self.pooled_width,
            "guidance_embeds": self.guided,
            "axes_dims_rope": list(self.rotary_axes),
        }

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "FluxConfig":
        """From the tensors of a checkpoint in one of the layouts of `flux_key_map`.

        Raises:
            ValueError: shapes of another kind of FLUX.1 (Fill, Control), or of another model.
        """
        width, inputs = shapes.of("img_in.weight", "x_embedder.weight")
        outputs, _ = shapes.of("final_layer.linear.weight", "proj_out.weight")
        if inputs != outputs or inputs % PATCH**2:
            raise ValueError(
                f"tokens have {inputs} values going in and {outputs} coming out; only FLUX.1 with outputs like its "
                "inputs can be used, not Fill or Control"
            )
        query_norm = ("double_blocks.0.img_attn.norm.query_norm.scale", "transformer_blocks.0.attn.norm_q.weight")
        (head_width,) = shapes.of(*query_norm, axes=1)
        return cls(
            latent_channels=inputs // PATCH**2,
            layers=shapes.count("double_blocks.", "transformer_blocks."),
            single_layers=shapes.count("single_blocks.", "single_transformer_blocks."),
            heads=width // head_width,
            head_width=head_width,
            text_width=shapes.of("txt_in.weight", "context_embedder.weight")[1],
            pooled_width=shapes.of("vector_in.in_layer.weight", "time_text_embed.text_embedder.linear_1.weight")[1],
            rotary_axes=rotary_share(cls().rotary_axes, head_width),
            guided=shapes.has("guidance_in.in_layer.weight", "time_text_embed.guidance_embedder.linear_1.weight"),
        )


class FluxDenoiser(PairingModule[StagesPrepared]):
    """See the module's first lines; implements `Denoiser`, `PairingDenoiser` and `UnmaskedDenoiser`. Its conditioning
    has `pooled` text, `guidance` where the model is guided, and one of `references` where it looks at a picture."""

    hoisted: ClassVar[tuple[str, ...]] = HOISTED
    walked: ClassVar[tuple[str, ...]] = ("blocks", "single_blocks")

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.config = config
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

    def prepared_for(self, conditionings: Sequence[Conditioning], run: Run) -> list[StagesPrepared]:
        """See `PairingModule`."""
        for conditioning in conditionings:
            self._check_fits(conditioning, run.shape)
        h = [functional.silu(self.embed(each, run.evaluations)) for each in conditionings]  # [E, B, D]
        joint = [self._modulations(f"modulation.{i}", h, 4) for i in range(self.config.layers)]
        single = [self._modulations(f"single_modulation.{i}", h, 1) for i in range(self.config.single_layers)]
        numbers = range(len(run.evaluations))
        return [
            StagesPrepared(
                told=StagesTold(
                    context=self.text_in(conditioning.states.to(self.text_in.weight.dtype)),
                    references=self._reference_tokens(conditioning.references),
                    rotary=self.rotary_tables(run.shape, conditioning),
                ),
                mask=FULL,
                attention=run.attention,
                runner=run.runner,
                modulation=[[block[n][e] for block in joint] for e in numbers],
                single_modulation=[[block[n][e] for block in single] for e in numbers],
                final=ungated(self.final_modulation(h[n])),
                places={point.index: e for e, point in enumerate(run.evaluations)},
            )
            for n, conditioning in enumerate(conditionings)
        ]

    def slope(self, x: Tensor, prepared: StagesPrepared, point: Point) -> Tensor:
        """noise - data, float32 [B, C, 1, h, w], at one of the points that were prepared."""
        e = prepared.places[point.index]
        h = run_stages(self._tokens(x), prepared, e, [*self.blocks], [*self.single_blocks])
        h = prepared.final[e].before(self.final_norm(h))
        return unpatchify(self.output(h), x.shape, PATCH).float()

    def takes_together(self, first: Conditioning, second: Conditioning) -> bool:
        """See `UnmaskedDenoiser`."""
        return are_as_long(first, second)

    def component(self) -> Component:
        """See `Saveable`."""
        return in_diffusers_layout("FluxTransformer2DModel", self.config.entries(), self.weights(), flux_key_map())

    def embed(self, conditioning: Conditioning, evaluations: Sequence[Point]) -> Tensor:
        """What all modulations come from: time, guidance and pooled text in one vector, [E, B, D]."""
        assert conditioning.pooled is not None
        device = conditioning.pooled.device
        vector = self.time_embed(sinusoid(thousandfold(evaluations, device)))[:, None]
        if self.guidance_embed is not None:
            assert conditioning.guidance is not None
            guidance = torch.tensor([conditioning.guidance], dtype=torch.float32, device=device)
            vector = vector + self.guidance_embed(sinusoid(guidance * TIME_SCALE))
        return vector + self.pooled_embed(conditioning.pooled)

    def _modulations(self, name: str, h: Sequence[Tensor], count: int) -> list[list[list[ShiftScaleGate]]]:
        return [gated(table, count) for table in self.projections(name, h)]

    def rotary_tables(self, shape: tuple[int, ...], conditioning: Conditioning) -> Rotary:
        """Tables for picture tokens, at (0, row, column), then a reference's, at (1, row, column), then text tokens,
        all at (0, 0, 0)."""
        shapes = (shape, *(latents.shape for latents in conditioning.references))
        grids = [
            grid_positions((1, rows // PATCH, columns // PATCH), start=(frame, 0, 0))
            for frame, (*_, rows, columns) in enumerate(shapes)
        ]
        text = grids[0].new_zeros(conditioning.states.shape[1], 3)
        return rotary_table(self.config.rotary(), torch.cat((*grids, text)).to(conditioning.states.device))

    def _tokens(self, latents: Tensor) -> Tensor:
        """[B, C, 1, h, w] to [B, N, D]."""
        return self.image_in(patchify(latents, PATCH).to(self.image_in.weight.dtype))

    def _reference_tokens(self, references: Sequence[Tensor]) -> Tensor | None:
        """[B, R, D]."""
        return self._tokens(references[0]) if references else None

    def _check_fits(self, conditioning: Conditioning, shape: tuple[int, ...]) -> None:
        config = self.config
        if len(conditioning.references) > 1:
            raise ValueError(f"there are {len(conditioning.references)} references; this model looks at one picture")
        check_states(conditioning, shape[0], config.text_width)
        check_pooled(conditioning, config.pooled_width)
        check_guidance(conditioning, guided=config.guided)
        check_unpadded(conditioning)
        for each in (shape, *(tuple(latents.shape) for latents in conditioning.references)):
            check_cells(each, config.latent_channels, PATCH)


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
        *joint_stream("x", "to_{}", "norm_{}", "to_out.0", "ff"),
        *joint_stream("context", "add_{}_proj", "norm_added_{}", "to_add_out", "ff_context"),
        Rule(f"{single}norm.linear.{{leaf}}", "single_modulation.{i}.{leaf}"),
        Rule(
            (*(f"{single}attn.to_{n}.{{leaf}}" for n in "qkv"), f"{single}proj_mlp.{{leaf}}"),
            "single_blocks.{i}.inner.{leaf}",
        ),
        Rule(f"{single}attn.norm_q.weight", "single_blocks.{i}.query_norm.weight"),
        Rule(f"{single}attn.norm_k.weight", "single_blocks.{i}.key_norm.weight"),
        Rule(f"{single}proj_out.{{leaf}}", "single_blocks.{i}.output.{leaf}"),
        *final_layer(),
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
