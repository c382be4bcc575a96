"""Sizes of HunyuanVideo 1.5's denoiser, from diffusers' config.json or from the tensors of a checkpoint.

Legend: C latent channels, P cells per token side, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.blocks.joint import JointConfig
from ..core.rotary import RotaryConfig
from .entries import FILE, check_fixed, number, rotary_axes, size, switch
from .shapes import Marks, Shapes, rotary_share

NORM_EPS = 1e-6
TARGET_SIZE = 640  # of the models for 480p
TASKS = ("t2v", "i2v")
MARKS = Marks(
    (
        (
            "x_embedder.proj.weight",
            "context_embedder.proj_in.weight",
            "context_embedder_2.linear_1.weight",
            "image_embedder.norm_in.weight",
            "cond_type_embed.weight",
        ),
        (
            "img_in.proj.weight",
            "txt_in.input_embedder.weight",
            "byt5_in.fc1.weight",
            "vision_in.proj.0.weight",
            "cond_type_embedding.weight",
        ),
    )
)


@dataclass(frozen=True, kw_only=True)
class HunyuanVideoConfig:
    """Sizes. `latent_channels` is C: the model reads C + 1 more beside them; `text_width`: of the language model's
    states, `glyph_width` of ByT5's, `picture_width` of the picture encoder's; `glyph_hidden`: of what reads the second.

    `meanflow`: it is also told the time that a step leads to, where a clip begins with a picture. `target_size`: clips
    have about its square in pixels. `task` is what the file says that it was trained for.
    """

    latent_channels: int = 32
    layers: int = 54
    refiner_layers: int = 2
    heads: int = 16
    head_width: int = 128
    hidden: int = 8192
    patch: int = 1
    text_width: int = 3584
    glyph_width: int = 1472
    glyph_hidden: int = 2048
    picture_width: int = 1152
    rotary_theta: float = 256.0
    rotary_axes: tuple[int, int, int] = (16, 56, 56)
    meanflow: bool = False
    target_size: int = TARGET_SIZE
    task: str = "i2v"

    @property
    def width(self) -> int:
        """D."""
        return self.heads * self.head_width

    @property
    def beside_channels(self) -> int:
        """Of latents of the clip in which only a picture is filled in, and of a mask."""
        return self.latent_channels + 1

    def block(self) -> JointConfig:
        """The blocks' config."""
        return JointConfig(
            heads=self.heads, head_width=self.head_width, hidden=self.hidden, norm_eps=NORM_EPS, qk_norm=True
        )

    def rotary(self) -> RotaryConfig:
        """The rotary embedding's config."""
        return RotaryConfig(axes=self.rotary_axes, theta=self.rotary_theta, pairing="interleaved", dtype="float32")

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "HunyuanVideoConfig":
        """From the entries of diffusers' `transformer/config.json`; what is missing has diffusers' default.

        Raises:
            ValueError: sizes of the wrong type or that do not fit each other, or another kind of model.
        """
        default = cls()
        channels = size(entries, "out_channels", default.latent_channels)
        heads = size(entries, "num_attention_heads", default.heads)
        head_width = size(entries, "attention_head_dim", default.head_width)
        config = cls(
            latent_channels=channels,
            layers=size(entries, "num_layers", default.layers),
            refiner_layers=size(entries, "num_refiner_layers", default.refiner_layers),
            heads=heads,
            head_width=head_width,
            hidden=int(heads * head_width * number(entries, "mlp_ratio", 4.0)),
            patch=size(entries, "patch_size", default.patch),
            text_width=size(entries, "text_embed_dim", default.text_width),
            glyph_width=size(entries, "text_embed_2_dim", default.glyph_width),
            picture_width=size(entries, "image_embed_dim", default.picture_width),
            rotary_theta=number(entries, "rope_theta", default.rotary_theta),
            rotary_axes=rotary_axes(entries, default.rotary_axes, head_width, "rope_axes_dim"),
            meanflow=switch(entries, "use_meanflow"),
            target_size=size(entries, "target_size", default.target_size),
            task=entries.get("task_type", default.task),
        )
        _check(config, entries)
        return config

    def entries(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        return {
            "in_channels": self.latent_channels + self.beside_channels,
            "out_channels": self.latent_channels,
            "num_attention_heads": self.heads,
            "attention_head_dim": self.head_width,
            "num_layers": self.layers,
            "num_refiner_layers": self.refiner_layers,
            "mlp_ratio": self.hidden / self.width,
            "patch_size": self.patch,
            "patch_size_t": 1,
            "qk_norm": "rms_norm",
            "text_embed_dim": self.text_width,
            "text_embed_2_dim": self.glyph_width,
            "image_embed_dim": self.picture_width,
            "rope_theta": self.rotary_theta,
            "rope_axes_dim": list(self.rotary_axes),
            "target_size": self.target_size,
            "task_type": self.task,
            "use_meanflow": self.meanflow,
        }

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "HunyuanVideoConfig":
        """From the tensors of a checkpoint in one of the layouts of `hunyuan_video_key_map`; the size of clips, which
        they do not show, is that of 480p.

        Raises:
            ValueError: shapes of another model.
        """
        default = cls()
        width, inputs, frames, *sides = shapes.of("x_embedder.proj.weight", "img_in.proj.weight", axes=5)
        outputs, _ = shapes.of("proj_out.weight", "final_layer.linear.weight")
        channels, rest = divmod(outputs, sides[0] ** 2)
        if rest or inputs != 2 * channels + 1 or frames != 1 or sides[0] != sides[1]:
            raise ValueError(
                f"the model reads {inputs} channels in patches of {[frames, *sides]} and gives {outputs} values of a "
                "token; HunyuanVideo 1.5 reads 1 more than twice the channels that it gives, in patches of one frame"
            )
        blocks, names = "transformer_blocks.", ("attn.norm_q.weight", "ff.net.0.proj.weight")
        if shapes.has("double_blocks.0.img_mod.linear.weight"):
            blocks, names = "double_blocks.", ("img_attn_q_norm.weight", "img_mlp.fc1.weight")
        (head_width,) = shapes.of(f"{blocks}0.{names[0]}", axes=1)
        refiner = ("context_embedder.token_refiner.refiner_blocks.", "txt_in.individual_token_refiner.blocks.")
        glyphs = shapes.of("context_embedder_2.linear_1.weight", "byt5_in.fc1.weight")
        return cls(
            latent_channels=channels,
            layers=shapes.count(blocks),
            refiner_layers=shapes.count(*refiner),
            heads=width // head_width,
            head_width=head_width,
            hidden=shapes.of(f"{blocks}0.{names[1]}")[0],
            patch=sides[0],
            text_width=shapes.of("context_embedder.proj_in.weight", "txt_in.input_embedder.weight")[1],
            glyph_width=glyphs[1],
            glyph_hidden=glyphs[0],
            picture_width=shapes.of("image_embedder.norm_in.weight", "vision_in.proj.0.weight", axes=1)[0],
            rotary_axes=rotary_share(default.rotary_axes, head_width),
            meanflow=shapes.has("time_embed.timestep_embedder_r.linear_1.weight", "time_r_in.mlp.0.weight"),
        )


def _check(config: HunyuanVideoConfig, entries: Mapping[str, Any]) -> None:
    """Makes sure that entries fit each other, and are of a kind that can be used. ValueError otherwise."""
    inputs = size(entries, "in_channels", config.latent_channels + config.beside_channels)
    if inputs != config.latent_channels + config.beside_channels:
        wanted = f"1 more than twice the {config.latent_channels} out_channels"
        raise ValueError(f"{FILE}: in_channels is {inputs}; it must be {wanted}")
    if config.task not in TASKS:
        raise ValueError(f"{FILE}: task_type is {config.task!r}; it must be one of {', '.join(TASKS)}")
    check_fixed(entries, {"patch_size_t": 1, "qk_norm": "rms_norm"})
