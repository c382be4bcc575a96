"""Sizes of Wan's denoisers, from diffusers' config.json or from the tensors of a checkpoint.

Legend: C latent channels, P = 2 cells per token side, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.blocks.cross import CrossConfig
from ..core.rotary import RotaryConfig
from .embedding import SINUSOID_WIDTH
from .entries import FILE, check_fixed, number, size, switch
from .shapes import Marks, Shapes

PATCH = 2
TEXT_TOKENS = 512
HEAD_WIDTH = 128  # of every model; shapes do not tell it: norms of queries and keys span all heads
QK_NORM = "rms_norm_across_heads"
PICTURE_KEYS = ("img_emb.proj.0.weight", "condition_embedder.image_embedder.norm1.weight")
"""One of these is there where the model reads states of pictures, of that width."""
MARKS = Marks(
    (
        (
            "patch_embedding.weight",
            "time_projection.1.weight",
            "blocks.0.self_attn.q.weight",
            "blocks.0.cross_attn.k.weight",
            "head.modulation",
        ),
        (
            "patch_embedding.weight",
            "condition_embedder.time_proj.weight",
            "blocks.0.attn1.to_q.weight",
            "blocks.0.attn2.to_k.weight",
            "scale_shift_table",
        ),
    )
)


@dataclass(frozen=True, kw_only=True)
class WanConfig:
    """Sizes. `latent_channels` is C; `beside_channels`: how many are read beside the latents' own (image-to-video: a
    mask's and C of pictures); `picture_width`: of a picture encoder's states, where they are read, `picture_positions`:
    how many there are, where each has an embedding of its own (first and last frame); `cross_norm`: see `CrossConfig`.
    """

    latent_channels: int = 16
    beside_channels: int = 0
    layers: int = 40
    heads: int = 40
    head_width: int = HEAD_WIDTH
    hidden: int = 13824
    text_width: int = 4096
    picture_width: int | None = None
    picture_positions: int | None = None
    time_width: int = SINUSOID_WIDTH
    norm_eps: float = 1e-6
    cross_norm: bool = True

    @property
    def width(self) -> int:
        """D."""
        return self.heads * self.head_width

    def block(self) -> CrossConfig:
        """The blocks' config."""
        return CrossConfig(
            heads=self.heads,
            head_width=self.head_width,
            hidden=self.hidden,
            norm_eps=self.norm_eps,
            cross_norm=self.cross_norm,
        )

    def rotary(self) -> RotaryConfig:
        """The rotary embedding's config: a third of the head for rows and for columns each, the rest for frames."""
        side = 2 * (self.head_width // 6)
        return RotaryConfig(axes=(self.head_width - 2 * side, side, side), pairing="interleaved", dtype="float64")

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "WanConfig":
        """From the entries of diffusers' `transformer/config.json`; what is missing has diffusers' default.

        `rope_max_seq_len` is not read: positions have no end here.

        Raises:
            ValueError: sizes of the wrong type or that do not fit each other.
        """
        default = cls()
        inputs = size(entries, "in_channels", default.latent_channels)
        outputs = entries.get("out_channels", default.latent_channels)
        channels = inputs if outputs is None else size({"out_channels": outputs}, "out_channels", 0)
        head_width = size(entries, "attention_head_dim", default.head_width)
        config = cls(
            latent_channels=channels,
            beside_channels=inputs - channels,
            layers=size(entries, "num_layers", default.layers),
            heads=size(entries, "num_attention_heads", default.heads),
            head_width=head_width,
            hidden=size(entries, "ffn_dim", default.hidden),
            text_width=size(entries, "text_dim", default.text_width),
            picture_width=_optional_size(entries, "image_dim"),
            picture_positions=_optional_size(entries, "pos_embed_seq_len"),
            time_width=size(entries, "freq_dim", default.time_width),
            norm_eps=number(entries, "eps", default.norm_eps),
            cross_norm=switch(entries, "cross_attn_norm", default.cross_norm),
        )
        _check(config, entries)
        return config

    def entries(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        return {
            "patch_size": [1, PATCH, PATCH],
            "in_channels": self.latent_channels + self.beside_channels,
            "out_channels": self.latent_channels,
            "num_layers": self.layers,
            "num_attention_heads": self.heads,
            "attention_head_dim": self.head_width,
            "ffn_dim": self.hidden,
            "text_dim": self.text_width,
            "freq_dim": self.time_width,
            "image_dim": self.picture_width,
            "added_kv_proj_dim": None if self.picture_width is None else self.width,
            "pos_embed_seq_len": self.picture_positions,
            "cross_attn_norm": self.cross_norm,
            "qk_norm": QK_NORM,
            "eps": self.norm_eps,
        }

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "WanConfig":
        """From the tensors of a checkpoint in one of the layouts of `wan_key_map`.

        Raises:
            ValueError: shapes of another model.
        """
        width, inputs, *_ = shapes.of("patch_embedding.weight", axes=5)
        outputs, _ = shapes.of("head.head.weight", "proj_out.weight")
        channels = outputs // PATCH**2
        if width % HEAD_WIDTH or outputs % PATCH**2 or inputs < channels:
            raise ValueError(
                f"the model is {width} wide, with {inputs} channels going in and {outputs} values of a token coming "
                f"out; Wan's are a multiple of {HEAD_WIDTH} wide, with {PATCH**2} values for each of at most as many "
                "channels"
            )
        return cls(
            latent_channels=channels,
            beside_channels=inputs - channels,
            layers=shapes.count("blocks."),
            heads=width // HEAD_WIDTH,
            hidden=shapes.of("blocks.0.ffn.0.weight", "blocks.0.ffn.net.0.proj.weight")[0],
            text_width=shapes.of("text_embedding.0.weight", "condition_embedder.text_embedder.linear_1.weight")[1],
            time_width=shapes.of("time_embedding.0.weight", "condition_embedder.time_embedder.linear_1.weight")[1],
            cross_norm=shapes.has("blocks.0.norm3.weight", "blocks.0.norm2.weight"),
            picture_width=_size(shapes, 0, *PICTURE_KEYS),
            picture_positions=_size(shapes, 1, "img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"),
        )


def _size(shapes: Shapes, axis: int, *names: str) -> int | None:
    """That of an axis of the first of these tensors that there is; None where there is none."""
    return next((shapes.shapes[name][axis] for name in names if shapes.has(name)), None)


def _optional_size(entries: Mapping[str, Any], name: str) -> int | None:
    return None if entries.get(name) is None else size(entries, name, 0)


def _check(config: WanConfig, entries: Mapping[str, Any]) -> None:
    """Makes sure that entries fit each other, and are of a kind that can be used. ValueError otherwise."""
    if config.head_width % 2 or config.head_width < 6:
        raise ValueError(f"{FILE}: attention_head_dim is {config.head_width}; it must be an even number over 5")
    if config.beside_channels < 0:
        inputs, outputs = config.latent_channels + config.beside_channels, config.latent_channels
        raise ValueError(f"{FILE}: in_channels is {inputs}; it must be at least out_channels, {outputs}")
    fixed: dict[str, object] = {"patch_size": [1, PATCH, PATCH], "qk_norm": QK_NORM}
    fixed["added_kv_proj_dim"] = None if config.picture_width is None else config.width
    if config.picture_width is None:
        fixed["pos_embed_seq_len"] = None
    check_fixed(entries, fixed, default={"added_kv_proj_dim": None})
