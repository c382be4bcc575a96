"""Qwen-Image and Qwen-Image-Edit: joint two-stream blocks over picture tokens and the states of a language model.

Flow matching: the network gives the slope dx/dsigma = noise - data. Its modulations depend on time alone, so their
weights (33 % of all) are read by `prepare` and never by a step. Latents of reference pictures go after those of the
picture, at frame positions of their own.

Source: diffusers' QwenImageTransformer2DModel.

Legend: B rows, E evaluations, C latent channels, h w latent cells, P = 2 cells per token side, N = h w / P^2 picture
tokens, M tokens of references, Lt text tokens, Dt text width, D width.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.attention.base import AttentionMask, AttentionSelector
from ..core.blocks.joint import JointBlock, JointConfig
from ..core.key_map import KeyMap, Layout, Rule
from ..core.modulation import Modulation, ShiftScale, Stretches
from ..core.norms import LayerNorm, RMSNorm
from ..core.rotary import Rotary, RotaryConfig, grid_positions, rotary_table
from ..core.saving import Component
from ..core.stream import BlockInputs, NoCache, Runner, Stream, run_blocks, walk
from ..schedulers.base import Point
from .base import Conditioning
from .embedding import SINUSOID_WIDTH, TIME_SCALE, Embedder, sinusoid
from .entries import FILE, rotary_axes, size, switch
from .fitting import check_guidance, check_states, text_mask
from .hoisting import HoistingModule, gated, ungated
from .keys import final_layer, joint_stream
from .patches import patchify, unpatchify
from .saving import in_diffusers_layout
from .shapes import Marks, Shapes, rotary_share

HOISTED = ("modulation.",)
"""What the names of weights that only `prepare` uses begin with."""
PATCH = 2
NORM_EPS = 1e-6
CLEAN_REFERENCES_KEY = "__index_timestep_zero__"
"""An empty entry by which single files say `zero_cond_t`."""
_NAMES = (
    "img_in.weight",
    "txt_norm.weight",
    "transformer_blocks.0.img_mod.1.weight",
    "transformer_blocks.0.attn.norm_added_q.weight",
)
MARKS = Marks((_NAMES,))
EDIT_MARKS = Marks(((*_NAMES, CLEAN_REFERENCES_KEY),))
"""Of Edit 2511; those of earlier ones cannot be told from Qwen-Image's."""


@dataclass(frozen=True, kw_only=True)
class QwenImageConfig:
    """Sizes. `latent_channels` is C; `clean_references`: tokens of reference pictures are modulated as at time 0, not
    at the picture's own (Edit 2511's `zero_cond_t`)."""

    latent_channels: int = 16
    layers: int = 60
    heads: int = 24
    head_width: int = 128
    text_width: int = 3584
    rotary_axes: tuple[int, int, int] = (16, 56, 56)
    clean_references: bool = False

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
        return RotaryConfig(axes=self.rotary_axes, pairing="interleaved", dtype="float32")

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "QwenImageConfig":
        """From the entries of diffusers' `transformer/config.json`; what is missing has diffusers' default.

        Raises:
            ValueError: sizes of the wrong type, or another kind of Qwen-Image (Layered) than this one.
        """
        default = cls()
        channels = size(entries, "out_channels", default.latent_channels)
        inputs, patch = size(entries, "in_channels", channels * PATCH**2), size(entries, "patch_size", PATCH)
        if patch != PATCH or inputs != channels * PATCH**2:
            raise ValueError(
                f"{FILE} has in_channels {inputs}, out_channels {channels}, patch_size {patch}; only models with "
                f"patch_size {PATCH} and in_channels of {PATCH**2} out_channels can be used"
            )
        for name in ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope"):
            if switch(entries, name):
                raise ValueError(f"{FILE}: {name} is true; models of that kind cannot be used")
        head_width = size(entries, "attention_head_dim", default.head_width)
        return cls(
            latent_channels=channels,
            layers=size(entries, "num_layers", default.layers),
            heads=size(entries, "num_attention_heads", default.heads),
            head_width=head_width,
            text_width=size(entries, "joint_attention_dim", default.text_width),
            rotary_axes=rotary_axes(entries, default.rotary_axes, head_width),
            clean_references=switch(entries, "zero_cond_t"),
        )

    def entries(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        return {
            "patch_size": PATCH,
            "in_channels": self.latent_channels * PATCH**2,
            "out_channels": self.latent_channels,
            "num_layers": self.layers,
            "attention_head_dim": self.head_width,
            "num_attention_heads": self.heads,
            "joint_attention_dim": self.text_width,
            "guidance_embeds": False,
            "axes_dims_rope": list(self.rotary_axes),
            "zero_cond_t": self.clean_references,
        }

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "QwenImageConfig":
        """From the tensors of a checkpoint in the layout of `qwen_image_key_map`.

        Raises:
            ValueError: shapes of another kind of Qwen-Image (Layered), or of another model.
        """
        width, inputs = shapes.of("img_in.weight")
        outputs, _ = shapes.of("proj_out.weight")
        if inputs != outputs or inputs % PATCH**2:
            raise ValueError(f"tokens have {inputs} values going in and {outputs} coming out; Qwen-Image has as many")
        if shapes.has("time_text_embed.addition_t_embedding.weight"):
            raise ValueError("the checkpoint is a Qwen-Image of another kind (Layered), which cannot be used")
        (head_width,) = shapes.of("transformer_blocks.0.attn.norm_q.weight", axes=1)
        return cls(
            latent_channels=inputs // PATCH**2,
            layers=shapes.count("transformer_blocks."),
            heads=width // head_width,
            head_width=head_width,
            text_width=shapes.of("txt_in.weight")[1],
            rotary_axes=rotary_share(cls().rotary_axes, head_width),
            clean_references=shapes.has(CLEAN_REFERENCES_KEY),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class QwenImageTold:
    """What is prepared of the text and of reference pictures, whose tokens follow the picture's."""

    context: Tensor  # [B, Lt, D]
    references: Tensor  # [B, M, D]
    rotary: Rotary
    mask: AttentionMask


@dataclass(frozen=True, kw_only=True, eq=False)
class QwenImagePrepared:
    """All that one run needs and that does not depend on the latents. `modulation[e]` are evaluation e's
    modulations of the blocks, `final[e]` that of the output layer; `places[index]` finds e by a point's index.
    """

    told: QwenImageTold
    attention: AttentionSelector
    runner: Runner
    modulation: Sequence[Sequence[Sequence[Modulation]]]
    final: Sequence[ShiftScale]
    places: Mapping[int, int]

    def inputs(self, e: int) -> BlockInputs:
        """What the blocks read in evaluation e."""
        told, modulation = self.told, self.modulation[e]
        return BlockInputs(rotary=told.rotary, mask=told.mask, attention=self.attention, modulation=modulation)


class QwenImageDenoiser(HoistingModule):
    """See the module's first lines; implements `Denoiser` and `SharingDenoiser`. Its conditioning may be padded, and
    have references."""

    hoisted: ClassVar[tuple[str, ...]] = HOISTED
    walked: ClassVar[tuple[str, ...]] = ("blocks",)

    def __init__(self, config: QwenImageConfig) -> None:
        super().__init__()
        self.config = config
        width, token = config.width, config.latent_channels * PATCH**2
        self.image_in = nn.Linear(token, width)
        self.text_norm = RMSNorm(config.text_width, eps=NORM_EPS)
        self.text_in = nn.Linear(config.text_width, width)
        self.time_embed = Embedder(SINUSOID_WIDTH, width)
        self.blocks = nn.ModuleList(JointBlock(config.block()) for _ in range(config.layers))
        self.modulation = nn.ModuleList(nn.Linear(width, 12 * width) for _ in range(config.layers))
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
    ) -> QwenImagePrepared:
        """Everything for latents of `shape` [B, C, 1, h, w] at these points.

        Raises:
            ValueError: latents or conditioning of a shape or kind that the model does not take.
        """
        told = self._told(conditioning, shape)
        h = functional.silu(self.embed([*(point.time for point in evaluations), 0.0]))[:, None]  # [E + 1, 1, D]
        num_tokens = (shape[3] * shape[4] // PATCH**2, told.references.shape[1])
        blocks = [self._modulations(i, h, num_tokens) for i in range(self.config.layers)]
        return QwenImagePrepared(
            told=told,
            attention=attention,
            runner=runner,
            modulation=[[block[e] for block in blocks] for e in range(len(evaluations))],
            final=ungated(self.final_modulation(h[:-1])),
            places={point.index: e for e, point in enumerate(evaluations)},
        )

    def prepare_beside(
        self, prepared: QwenImagePrepared, conditioning: Conditioning, shape: tuple[int, ...]
    ) -> QwenImagePrepared:
        """See `SharingDenoiser`: the modulations are shared.

        Raises:
            ValueError: as for `prepare`, or there are not as many tokens of references.
        """
        told = self._told(conditioning, shape)
        found, wanted = (each.references.shape[1] for each in (told, prepared.told))
        if found != wanted:
            raise ValueError(f"references have {found} tokens; the prompt's have {wanted}")
        return dataclasses.replace(prepared, told=told)

    def _told(self, conditioning: Conditioning, shape: tuple[int, ...]) -> QwenImageTold:
        self._check_fits(conditioning, shape)
        pictures = [shape, *(tuple(each.shape) for each in conditioning.references)]
        longest = int(conditioning.lengths.max())
        states = conditioning.states[:, :longest].to(self.image_in.weight.dtype)
        num_before = sum(each[3] * each[4] // PATCH**2 for each in pictures)
        return QwenImageTold(
            context=self.text_in(self.text_norm(states)),
            references=self._tokens(conditioning.references, shape[0]),
            rotary=rotary_table(self.config.rotary(), _positions(pictures, longest).to(states.device)),
            mask=text_mask(conditioning.lengths, longest, num_before),
        )

    def slope(self, x: Tensor, prepared: QwenImagePrepared, point: Point) -> Tensor:
        """noise - data, float32 [B, C, 1, h, w], at one of the points that were prepared."""
        e = prepared.places[point.index]
        tokens, told = self.image_in(patchify(x, PATCH).to(self.image_in.weight.dtype)), prepared.told
        stream = Stream(x=torch.cat((tokens, told.references), dim=1), context=told.context)
        stream = walk(prepared.runner, [*self.blocks], stream, prepared.inputs(e), NoCache())
        h = prepared.final[e].before(self.final_norm(stream.x[:, : tokens.shape[1]]))
        return unpatchify(self.output(h), x.shape, PATCH).float()

    def component(self) -> Component:
        """See `Saveable`."""
        return in_diffusers_layout(
            "QwenImageTransformer2DModel", self.config.entries(), self.weights(), qwen_image_key_map()
        )

    def embed(self, times: Sequence[float]) -> Tensor:
        """What all modulations come from, [E, D] for E times."""
        values = torch.tensor(times, dtype=torch.float32, device=self.image_in.weight.device)
        values = values * TIME_SCALE / TIME_SCALE  # rounded as in the reference: an angle of 1000 shows its last bit
        return self.time_embed(sinusoid(values, scale=TIME_SCALE))

    def _modulations(self, i: int, h: Tensor, num_tokens: tuple[int, int]) -> list[list[Modulation]]:
        """Per evaluation, block i's four modulations; the last row of h [E + 1, 1, D] is that of time 0. `num_tokens`:
        of the picture, and of its references."""
        *each, clean = gated(self.projected(f"modulation.{i}", h), 4)
        if not self.config.clean_references or num_tokens[1] == 0:
            return [list[Modulation](four) for four in each]
        return [
            [*(Stretches(lengths=num_tokens, parts=(four[n], clean[n])) for n in range(2)), *four[2:]] for four in each
        ]

    def _tokens(self, references: Sequence[Tensor], rows: int) -> Tensor:
        """Tokens [B, M, D] of reference pictures, each [B, C, 1, h, w]."""
        weight = self.image_in.weight
        if not references:
            return weight.new_zeros(rows, 0, self.config.width)
        return self.image_in(torch.cat([patchify(each.to(weight), PATCH) for each in references], dim=1))

    def _check_fits(self, conditioning: Conditioning, shape: tuple[int, ...]) -> None:
        config = self.config
        check_states(conditioning, shape[0], config.text_width)
        check_guidance(conditioning, guided=False)
        for name, each in (("latents", shape), *(("references", tuple(x.shape)) for x in conditioning.references)):
            if each[:3] != (shape[0], config.latent_channels, 1) or any(side % PATCH for side in each[3:]):
                taken = f"{shape[0]} rows, {config.latent_channels} channels, one frame, sides in steps of {PATCH}"
                raise ValueError(f"{name} are {each}; this model takes {taken}")


def _positions(pictures: Sequence[tuple[int, ...]], num_text: int) -> Tensor:
    """Where tokens stand, [N + M + Lt, 3]: picture n at frame n, rows and columns counted from its middle; text on the
    diagonal, from the largest picture's edge on."""
    sides = [(shape[3] // PATCH, shape[4] // PATCH) for shape in pictures]
    grids = [
        grid_positions((1, rows, columns), start=(n, rows // 2 - rows, columns // 2 - columns))
        for n, (rows, columns) in enumerate(sides)
    ]
    text = torch.arange(num_text) + max(side // 2 for pair in sides for side in pair)
    return torch.cat((*grids, text[:, None].expand(-1, 3)))


def qwen_image_key_map() -> KeyMap:
    """diffusers' layout, whose names single files (ComfyUI's) have as well."""
    block = "transformer_blocks.{i}."
    rules = (
        Rule("img_in.{leaf}", "image_in.{leaf}"),
        Rule("txt_norm.weight", "text_norm.weight"),
        Rule("txt_in.{leaf}", "text_in.{leaf}"),
        Rule("time_text_embed.timestep_embedder.linear_1.{leaf}", "time_embed.inner.{leaf}"),
        Rule("time_text_embed.timestep_embedder.linear_2.{leaf}", "time_embed.outer.{leaf}"),
        Rule((f"{block}img_mod.1.{{leaf}}", f"{block}txt_mod.1.{{leaf}}"), "modulation.{i}.{leaf}"),
        *joint_stream("x", "to_{}", "norm_{}", "to_out.0", "img_mlp"),
        *joint_stream("context", "add_{}_proj", "norm_added_{}", "to_add_out", "txt_mlp"),
        *final_layer(),
    )
    return KeyMap((Layout("diffusers", rules, drops=(CLEAN_REFERENCES_KEY,), prefixes=("", "model.diffusion_model.")),))
