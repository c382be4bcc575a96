"""Sizes of LTX-Video's denoisers, from diffusers' config.json or from the tensors of a checkpoint.

Legend: C latent channels, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.blocks.cross import CrossConfig
from .entries import FILE, check_fixed, number, size
from .shapes import Marks, Shapes

HEADS = 32  # of every model; shapes do not tell it: norms of queries and keys span all heads
EXPANSION = 4  # the MLPs' width over D
QK_NORM_EPS, FINAL_NORM_EPS = 1e-5, 1e-6
FIXED: Mapping[str, object] = {
    "patch_size": 1,
    "patch_size_t": 1,
    "activation_fn": "gelu-approximate",
    "qk_norm": "rms_norm_across_heads",
    "norm_elementwise_affine": False,
    "attention_bias": True,
    "attention_out_bias": True,
}
"""Entries of which one value alone is known, that of all models."""
MARKS = Marks(
    (
        (
            "patchify_proj.weight",
            "adaln_single.linear.weight",
            "caption_projection.linear_1.weight",
            "transformer_blocks.0.attn1.q_norm.weight",
            "transformer_blocks.0.attn2.to_k.weight",
            "scale_shift_table",
        ),
        (
            "proj_in.weight",
            "time_embed.linear.weight",
            "caption_projection.linear_1.weight",
            "transformer_blocks.0.attn1.norm_q.weight",
            "transformer_blocks.0.attn2.to_k.weight",
            "scale_shift_table",
        ),
    )
)
SOUND = "audio_patchify_proj.weight"
"""A tensor of LTX-2, which makes sound too, and has all names of LTX-Video besides."""


@dataclass(frozen=True, kw_only=True)
class LTXConfig:
    """Sizes; `latent_channels` is C."""

    latent_channels: int = 128
    layers: int = 28
    heads: int = HEADS
    head_width: int = 64
    text_width: int = 4096
    norm_eps: float = 1e-6

    @property
    def width(self) -> int:
        """D."""
        return self.heads * self.head_width

    def block(self) -> CrossConfig:
        """The blocks' config."""
        return CrossConfig(
            heads=self.heads,
            head_width=self.head_width,
            hidden=EXPANSION * self.width,
            norm_eps=self.norm_eps,
            cross_norm=False,
            qk_norm_eps=QK_NORM_EPS,
        )

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "LTXConfig":
        """From the entries of diffusers' `transformer/config.json`; what is missing has diffusers' default.

        Raises:
            ValueError: sizes of the wrong type or that do not fit each other, or a kind of model that is not known.
        """
        default = cls()
        config = cls(
            latent_channels=size(entries, "in_channels", default.latent_channels),
            layers=size(entries, "num_layers", default.layers),
            heads=size(entries, "num_attention_heads", default.heads),
            head_width=size(entries, "attention_head_dim", default.head_width),
            text_width=size(entries, "caption_channels", default.text_width),
            norm_eps=number(entries, "norm_eps", default.norm_eps),
        )
        if config.head_width % 2 or config.width < 6:
            width = f"{config.head_width} for {config.heads} heads"
            raise ValueError(f"{FILE}: attention_head_dim is {width}; it must be even, over 5 for all heads together")
        _check(config, entries)
        return config

    def entries(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        return {
            **FIXED,
            "in_channels": self.latent_channels,
            "out_channels": self.latent_channels,
            "num_layers": self.layers,
            "num_attention_heads": self.heads,
            "attention_head_dim": self.head_width,
            "cross_attention_dim": self.width,
            "caption_channels": self.text_width,
            "norm_eps": self.norm_eps,
        }

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "LTXConfig":
        """From the tensors of a checkpoint in one of the layouts of `ltx_key_map`.

        Raises:
            ValueError: shapes of another model.
        """
        if shapes.has(SOUND):
            raise ValueError(f"it has {SOUND}: it looks like LTX-2; only LTX-Video can be loaded")
        width, channels = shapes.of("patchify_proj.weight", "proj_in.weight")
        if width % (2 * HEADS):
            raise ValueError(f"the model is {width} wide; LTX-Video's are a multiple of {2 * HEADS} wide")
        return cls(
            latent_channels=channels,
            layers=shapes.count("transformer_blocks."),
            head_width=width // HEADS,
            text_width=shapes.of("caption_projection.linear_1.weight")[1],
        )


def _check(config: LTXConfig, entries: Mapping[str, Any]) -> None:
    """Makes sure that entries are of the kind that is known, and fit the sizes. ValueError otherwise."""
    fixed = {**FIXED, "cross_attention_dim": config.width}
    if entries.get("out_channels") is not None:
        fixed["out_channels"] = config.latent_channels
    check_fixed(entries, fixed, default={"cross_attention_dim": LTXConfig().width})
