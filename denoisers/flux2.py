"""FLUX.2 (dev, klein): joint two-stream blocks, then single parallel ones, with modulations that all blocks share.

Flow matching: the network gives the slope dx/dsigma = noise - data. Tokens are single latent cells. Reference pictures
are further tokens, each at its own place on the first of four rotary axes: picture tokens stand at (0, row, column, 0),
those of reference k at (10 k, row, column, 0), text tokens at (0, 0, 0, place).

Source: diffusers' Flux2Transformer2DModel and Black Forest Labs' flux2 repository.

Legend: B rows, E evaluations, C latent channels, h w latent cells, Lt text tokens, Dt text width, D width.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nextafter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.attention.base import FULL, AttentionSelector
from ..core.blocks.joint import JointBlock, JointConfig
from ..core.blocks.parallel import ParallelBlock
from ..core.key_map import KeyMap, Layout, Rule
from ..core.mlp import SwiGLU
from ..core.norms import LayerNorm
from ..core.rotary import Rotary, RotaryConfig, grid_positions, rotary_table
from ..core.saving import Component
from ..core.stream import Runner, run_blocks
from ..schedulers.base import Point
from .base import Conditioning
from .embedding import SINUSOID_WIDTH, TIME_SCALE, Embedder, sinusoid, thousandfold
from .entries import FILE, number, rotary_axes, size, switch
from .fitting import are_as_long, check_guidance, check_states, check_unpadded
from .hoisting import HoistingModule, gated, ungated
from .keys import SWIGLU_LAYERS, final_layer, joint_stream
from .patches import patchify, unpatchify
from .saving import in_diffusers_layout
from .shapes import Marks, Shapes, rotary_share
from .stages import StagesPrepared, StagesTold, run_stages

MARKS = Marks(
    (
        (
            "double_stream_modulation_img.lin.weight",
            "double_blocks.0.img_attn.qkv.weight",
            "single_blocks.0.linear1.weight",
        ),
        (
            "double_stream_modulation_img.linear.weight",
            "transformer_blocks.0.attn.add_q_proj.weight",
            "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight",
        ),
    )
)
REFERENCE_STEP = 10
"""Reference k stands at this times k on the first axis."""


@dataclass(frozen=True, kw_only=True)
class Flux2Config:
    """Sizes. `hidden` is the width of an MLP; `guided`: whether there is a guidance embedding (dev; klein has none)."""

    latent_channels: int = 128
    layers: int = 8
    single_layers: int = 48
    heads: int = 48
    head_width: int = 128
    hidden: int = 18432
    text_width: int = 15360
    sinusoid_width: int = SINUSOID_WIDTH
    rotary_axes: tuple[int, int, int, int] = (32, 32, 32, 32)
    theta: float = 2000.0
    norm_eps: float = 1e-6
    guided: bool = True

    @property
    def width(self) -> int:
        """D."""
        return self.heads * self.head_width

    def block(self) -> JointConfig:
        """The blocks' config."""
        return JointConfig(
            heads=self.heads,
            head_width=self.head_width,
            hidden=self.hidden,
            norm_eps=self.norm_eps,
            mlp=SwiGLU(),
            bias=False,
        )

    def rotary(self) -> RotaryConfig:
        """The rotary embedding's config."""
        return RotaryConfig(axes=self.rotary_axes, theta=self.theta, pairing="interleaved", dtype="float64")

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "Flux2Config":
        """From the entries of diffusers' `transformer/config.json`; what is missing has diffusers' default.

        Raises:
            ValueError: sizes of the wrong type, or outputs that are not like the inputs.
        """
        default = cls()
        channels = size(entries, "in_channels", default.latent_channels)
        if entries.get("patch_size", 1) != 1 or entries.get("out_channels", None) not in (None, channels):
            raise ValueError(
                f"{FILE} has in_channels {channels}, out_channels {entries.get('out_channels')}, patch_size "
                f"{entries.get('patch_size')}; only FLUX.2 with outputs like its inputs can be used"
            )
        heads = size(entries, "num_attention_heads", default.heads)
        head_width = size(entries, "attention_head_dim", default.head_width)
        return cls(
            latent_channels=channels,
            layers=size(entries, "num_layers", default.layers),
            single_layers=size(entries, "num_single_layers", default.single_layers),
            heads=heads,
            head_width=head_width,
            hidden=int(heads * head_width * number(entries, "mlp_ratio", 3.0)),
            text_width=size(entries, "joint_attention_dim", default.text_width),
            sinusoid_width=size(entries, "timestep_guidance_channels", default.sinusoid_width),
            rotary_axes=rotary_axes(entries, default.rotary_axes, head_width),
            theta=number(entries, "rope_theta", default.theta),
            norm_eps=number(entries, "eps", default.norm_eps),
            guided=switch(entries, "guidance_embeds", default.guided),
        )

    def entries(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        ratio = self.hidden / self.width
        if int(self.width * ratio) < self.hidden:
            ratio = nextafter(ratio, inf)  # the reference rounds down
        return {
            "patch_size": 1,
            "in_channels": self.latent_channels,
            "num_layers": self.layers,
            "num_single_layers": self.single_layers,
            "attention_head_dim": self.head_width,
            "num_attention_heads": self.heads,
            "joint_attention_dim": self.text_width,
            "timestep_guidance_channels": self.sinusoid_width,
            "mlp_ratio": ratio,
            "axes_dims_rope": list(self.rotary_axes),
            "rope_theta": self.theta,
            "eps": self.norm_eps,
            "guidance_embeds": self.guided,
        }

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "Flux2Config":
        """From the tensors of a checkpoint in one of the layouts of `flux2_key_map`.

        Raises:
            ValueError: shapes of another model.
        """
        width, inputs = shapes.of("img_in.weight", "x_embedder.weight")
        outputs, _ = shapes.of("final_layer.linear.weight", "proj_out.weight")
        if inputs != outputs:
            raise ValueError(f"tokens have {inputs} values going in and {outputs} coming out; FLUX.2 has as many")
        query_norm = ("double_blocks.0.img_attn.norm.query_norm.scale", "transformer_blocks.0.attn.norm_q.weight")
        (head_width,) = shapes.of(*query_norm, axes=1)
        time = ("time_in.in_layer.weight", "time_guidance_embed.timestep_embedder.linear_1.weight")
        return cls(
            latent_channels=inputs,
            layers=shapes.count("double_blocks.", "transformer_blocks."),
            single_layers=shapes.count("single_blocks.", "single_transformer_blocks."),
            heads=width // head_width,
            head_width=head_width,
            hidden=shapes.of("double_blocks.0.img_mlp.2.weight", "transformer_blocks.0.ff.linear_out.weight")[1],
            text_width=shapes.of("txt_in.weight", "context_embedder.weight")[1],
            sinusoid_width=shapes.of(*time)[1],
            rotary_axes=rotary_share(cls().rotary_axes, head_width),
            guided=shapes.has("guidance_in.in_layer.weight", "time_guidance_embed.guidance_embedder.linear_1.weight"),
        )


class Flux2Denoiser(HoistingModule):
    """See the module's first lines; implements `Denoiser`, `SharingDenoiser` and `UnmaskedDenoiser`. Its conditioning
    has `guidance` where the model is guided, and `references` where there are pictures to look at."""

    hoisted: ClassVar[tuple[str, ...]] = ("picture_modulation.", "text_modulation.", "single_modulation.")
    walked: ClassVar[tuple[str, ...]] = ("blocks", "single_blocks")

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.image_in = nn.Linear(config.latent_channels, width, bias=False)
        self.text_in = nn.Linear(config.text_width, width, bias=False)
        self.time_embed = Embedder(config.sinusoid_width, width, bias=False)
        self.guidance_embed = Embedder(config.sinusoid_width, width, bias=False) if config.guided else None
        self.picture_modulation = nn.Linear(width, 6 * width, bias=False)
        self.text_modulation = nn.Linear(width, 6 * width, bias=False)
        self.single_modulation = nn.Linear(width, 3 * width, bias=False)
        self.blocks = nn.ModuleList(JointBlock(config.block()) for _ in range(config.layers))
        self.single_blocks = nn.ModuleList(ParallelBlock(config.block()) for _ in range(config.single_layers))
        self.final_norm = LayerNorm(width, eps=config.norm_eps, affine=False)
        self.final_modulation = nn.Linear(width, 2 * width, bias=False)
        self.output = nn.Linear(width, config.latent_channels, bias=False)

    def prepare(
        self,
        conditioning: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> StagesPrepared:
        """Everything for latents of `shape` [B, C, 1, h, w] at these points.

        Raises:
            ValueError: latents or conditioning of a shape or kind that the model does not take.
        """
        told = self._told(conditioning, shape)
        h = functional.silu(self.embed(conditioning, evaluations))[:, None]  # [E, 1, D]
        picture, text = (gated(self.projected(name, h), 2) for name in ("picture_modulation", "text_modulation"))
        single = gated(self.projected("single_modulation", h), 1)
        count = len(evaluations)
        return StagesPrepared(
            told=told,
            mask=FULL,
            attention=attention,
            runner=runner,
            modulation=[[picture[e] + text[e]] * self.config.layers for e in range(count)],
            single_modulation=[[single[e]] * self.config.single_layers for e in range(count)],
            final=ungated(self.final_modulation(h)),
            places={point.index: e for e, point in enumerate(evaluations)},
        )

    def prepare_beside(
        self, prepared: StagesPrepared, conditioning: Conditioning, shape: tuple[int, ...]
    ) -> StagesPrepared:
        """See `SharingDenoiser`: the modulations are shared; both are told the same guidance."""
        return dataclasses.replace(prepared, told=self._told(conditioning, shape))

    def takes_together(self, first: Conditioning, second: Conditioning) -> bool:
        """See `UnmaskedDenoiser`."""
        return are_as_long(first, second)

    def _told(self, conditioning: Conditioning, shape: tuple[int, ...]) -> StagesTold:
        self._check_fits(conditioning, shape)
        return StagesTold(
            context=self.text_in(conditioning.states.to(self.text_in.weight.dtype)),
            references=self._reference_tokens(conditioning.references),
            rotary=self.rotary_tables(shape, conditioning),
        )

    def slope(self, x: Tensor, prepared: StagesPrepared, point: Point) -> Tensor:
        """noise - data, float32 [B, C, 1, h, w], at one of the points that were prepared."""
        e = prepared.places[point.index]
        h = run_stages(self._tokens(x), prepared, e, [*self.blocks], [*self.single_blocks])
        h = prepared.final[e].before(self.final_norm(h))
        return unpatchify(self.output(h), x.shape, 1).float()

    def component(self) -> Component:
        """See `Saveable`."""
        return in_diffusers_layout("Flux2Transformer2DModel", self.config.entries(), self.weights(), flux2_key_map())

    def embed(self, conditioning: Conditioning, evaluations: Sequence[Point]) -> Tensor:
        """What all modulations come from: time and guidance in one vector, [E, D]."""
        device, width = conditioning.states.device, self.config.sinusoid_width
        vector = self.time_embed(sinusoid(thousandfold(evaluations, device), width))
        if self.guidance_embed is None:
            return vector
        guidance = torch.tensor([conditioning.guidance], dtype=torch.float32, device=device)
        return vector + self.guidance_embed(sinusoid(guidance * TIME_SCALE, width))

    def rotary_tables(self, shape: tuple[int, ...], conditioning: Conditioning) -> Rotary:
        """Tables for picture tokens, then those of the references, then text tokens."""
        picture, text = grid_positions((1, *shape[3:], 1)), grid_positions((1, 1, 1, conditioning.states.shape[1]))
        places = (picture, *reference_places(conditioning.references), text)
        return rotary_table(self.config.rotary(), torch.cat(places).to(conditioning.states.device))

    def _tokens(self, latents: Tensor) -> Tensor:
        """[B, C, 1, h, w] to [B, h w, D]."""
        return self.image_in(patchify(latents, 1).to(self.image_in.weight.dtype))

    def _reference_tokens(self, references: Sequence[Tensor]) -> Tensor | None:
        return torch.cat([self._tokens(latents) for latents in references], dim=1) if references else None

    def _check_fits(self, conditioning: Conditioning, shape: tuple[int, ...]) -> None:
        config = self.config
        check_states(conditioning, shape[0], config.text_width)
        check_guidance(conditioning, guided=config.guided)
        check_unpadded(conditioning)
        given = {"latents": shape, **{f"reference {k}": x.shape for k, x in enumerate(conditioning.references, 1)}}
        for name, found in given.items():
            if found[1] != config.latent_channels or found[2] != 1:
                taken = f"{config.latent_channels} channels and one frame"
                raise ValueError(f"{name} of shape {tuple(found)}: this model takes {taken}")


def reference_places(references: Sequence[Tensor]) -> list[Tensor]:
    """Where the tokens of each picture that is looked at stand, [h w, 4]."""
    return [
        grid_positions((1, *latents.shape[3:], 1), start=(REFERENCE_STEP * k, 0, 0, 0))
        for k, latents in enumerate(references, start=1)
    ]


def flux2_key_map() -> KeyMap:
    """diffusers' layout, and Black Forest Labs' own, as ComfyUI saves it too."""
    return KeyMap((_diffusers(), _original()))


_EMBEDDERS = (("time_embed", "timestep_embedder", "time_in"), ("guidance_embed", "guidance_embedder", "guidance_in"))
_MODULATIONS = (
    ("picture_modulation", "double_stream_modulation_img"),
    ("text_modulation", "double_stream_modulation_txt"),
    ("single_modulation", "single_stream_modulation"),
)


def _diffusers() -> Layout:
    single, ours = "single_transformer_blocks.{i}.attn.", "single_blocks.{i}."
    embed = "time_guidance_embed.{}.linear_{}.weight"
    rules = [
        Rule("x_embedder.weight", "image_in.weight"),
        Rule("context_embedder.weight", "text_in.weight"),
        *(Rule(embed.format(theirs, 1), f"{target}.inner.weight") for target, theirs, _ in _EMBEDDERS),
        *(Rule(embed.format(theirs, 2), f"{target}.outer.weight") for target, theirs, _ in _EMBEDDERS),
        *(Rule(f"{theirs}.linear.weight", f"{target}.weight") for target, theirs in _MODULATIONS),
        *joint_stream("x", "to_{}", "norm_{}", "to_out.0", "ff", SWIGLU_LAYERS),
        *joint_stream("context", "add_{}_proj", "norm_added_{}", "to_add_out", "ff_context", SWIGLU_LAYERS),
        Rule(f"{single}to_qkv_mlp_proj.weight", f"{ours}inner.weight"),
        Rule(f"{single}norm_q.weight", f"{ours}query_norm.weight"),
        Rule(f"{single}norm_k.weight", f"{ours}key_norm.weight"),
        Rule(f"{single}to_out.weight", f"{ours}output.weight"),
        *final_layer(),
    ]
    return Layout("diffusers", tuple(rules))


def _original() -> Layout:
    single = "single_blocks.{i}."
    rules = [
        Rule("img_in.weight", "image_in.weight"),
        Rule("txt_in.weight", "text_in.weight"),
        *(Rule(f"{theirs}.in_layer.weight", f"{target}.inner.weight") for target, _, theirs in _EMBEDDERS),
        *(Rule(f"{theirs}.out_layer.weight", f"{target}.outer.weight") for target, _, theirs in _EMBEDDERS),
        *(Rule(f"{theirs}.lin.weight", f"{target}.weight") for target, theirs in _MODULATIONS),
        *_original_stream("x", "img"),
        *_original_stream("context", "txt"),
        Rule(f"{single}linear1.weight", f"{single}inner.weight"),
        Rule(f"{single}norm.query_norm.scale", f"{single}query_norm.weight"),
        Rule(f"{single}norm.key_norm.scale", f"{single}key_norm.weight"),
        Rule(f"{single}linear2.weight", f"{single}output.weight"),
        Rule("final_layer.adaLN_modulation.1.weight", "final_modulation.weight"),
        Rule("final_layer.linear.weight", "output.weight"),
    ]
    return Layout("original", tuple(rules), prefixes=("", "model.diffusion_model."))


def _original_stream(ours: str, theirs: str) -> list[Rule]:
    block, target = f"double_blocks.{{i}}.{theirs}_", f"blocks.{{i}}.{ours}."
    return [
        Rule(f"{block}attn.qkv.weight", f"{target}qkv.weight"),
        Rule(f"{block}attn.norm.query_norm.scale", f"{target}query_norm.weight"),
        Rule(f"{block}attn.norm.key_norm.scale", f"{target}key_norm.weight"),
        Rule(f"{block}attn.proj.weight", f"{target}output.weight"),
        Rule(f"{block}mlp.0.weight", f"{target}mlp.gate_up.weight"),
        Rule(f"{block}mlp.2.weight", f"{target}mlp.down.weight"),
    ]
