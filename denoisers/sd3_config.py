"""The sizes of Stable Diffusion 3 and 3.5, and what its checkpoints' headers and configs say of them.

Legend: C latent channels, P = 2 cells per token side, G tokens a side of the table of positions, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, cast

from ..core.blocks.joint import JointConfig
from .entries import FILE, size
from .shapes import Marks, Shapes

PATCH = 2
NORM_EPS = 1e-6
HEAD_WIDTH = 64  # of every model without norms of queries and keys, from whose shapes it cannot be told
MARKS = Marks(
    (
        (
            "x_embedder.proj.weight",
            "context_embedder.weight",
            "y_embedder.mlp.0.weight",
            "joint_blocks.0.x_block.attn.qkv.weight",
        ),
        (
            "pos_embed.proj.weight",
            "context_embedder.weight",
            "time_text_embed.text_embedder.linear_1.weight",
            "transformer_blocks.0.norm1_context.linear.weight",
        ),
    )
)


@dataclass(frozen=True, kw_only=True)
class SD3Config:
    """Sizes. `grid` is G; `dual_layers` are the blocks with a second attention (SD3.5 medium's first 13);
    `sample_cells` are the cells a side of the pictures that the model was made for."""

    latent_channels: int = 16
    layers: int = 18
    heads: int = 18
    head_width: int = 64
    text_width: int = 4096
    pooled_width: int = 2048
    grid: int = 96
    qk_norm: bool = False
    dual_layers: tuple[int, ...] = ()
    sample_cells: int = 128

    @property
    def width(self) -> int:
        """D."""
        return self.heads * self.head_width

    def block(self) -> JointConfig:
        """The blocks' config."""
        return JointConfig(
            heads=self.heads, head_width=self.head_width, hidden=4 * self.width, norm_eps=NORM_EPS, qk_norm=self.qk_norm
        )

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "SD3Config":
        """From the entries of diffusers' `transformer/config.json`; what is missing has diffusers' default.

        Raises:
            ValueError: sizes of the wrong type, or a model with other inputs or layers than SD3's.
        """
        default = cls()
        heads = size(entries, "num_attention_heads", default.heads)
        head_width = size(entries, "attention_head_dim", default.head_width)
        channels = size(entries, "in_channels", default.latent_channels)
        layers = size(entries, "num_layers", default.layers)
        _require(entries, "patch_size", PATCH, (PATCH,))
        _require(entries, "out_channels", default.latent_channels, (channels, None))
        _require(entries, "caption_projection_dim", 1152, (heads * head_width,))
        _require(entries, "qk_norm", None, ("rms_norm", None))
        return cls(
            latent_channels=channels,
            layers=layers,
            heads=heads,
            head_width=head_width,
            text_width=size(entries, "joint_attention_dim", default.text_width),
            pooled_width=size(entries, "pooled_projection_dim", default.pooled_width),
            grid=size(entries, "pos_embed_max_size", default.grid),
            qk_norm=entries.get("qk_norm") is not None,
            dual_layers=_dual_layers(entries.get("dual_attention_layers", ()), layers),
            sample_cells=size(entries, "sample_size", default.sample_cells),
        )

    def entries(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        return {
            "sample_size": self.sample_cells,
            "patch_size": PATCH,
            "in_channels": self.latent_channels,
            "num_layers": self.layers,
            "attention_head_dim": self.head_width,
            "num_attention_heads": self.heads,
            "joint_attention_dim": self.text_width,
            "caption_projection_dim": self.width,
            "pooled_projection_dim": self.pooled_width,
            "out_channels": self.latent_channels,
            "pos_embed_max_size": self.grid,
            "dual_attention_layers": list(self.dual_layers),
            "qk_norm": "rms_norm" if self.qk_norm else None,
        }

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "SD3Config":
        """From the tensors of a checkpoint in one of the layouts of `sd3_key_map`.

        Raises:
            ValueError: shapes of another model.
        """
        width, channels, patch, _ = shapes.of("x_embedder.proj.weight", "pos_embed.proj.weight", axes=4)
        outputs, _ = shapes.of("final_layer.linear.weight", "proj_out.weight")
        query_norms = ("joint_blocks.0.x_block.attn.ln_q.weight", "transformer_blocks.0.attn.norm_q.weight")
        head_width = shapes.of(*query_norms, axes=1)[0] if shapes.has(*query_norms) else HEAD_WIDTH
        if patch != PATCH or outputs != channels * PATCH**2 or width % head_width:
            raise ValueError(
                f"tokens of {patch} x {patch} cells are {width} wide, of {channels * patch**2} values going in and "
                f"{outputs} coming out; only SD3 with {PATCH} x {PATCH} cells, outputs like its inputs and heads of "
                f"{head_width} can be used"
            )
        layers = shapes.count("joint_blocks.", "transformer_blocks.")
        second = ("joint_blocks.{}.x_block.attn2.qkv.weight", "transformer_blocks.{}.attn2.to_q.weight")
        return cls(
            latent_channels=channels,
            layers=layers,
            heads=width // head_width,
            head_width=head_width,
            text_width=shapes.of("context_embedder.weight")[1],
            pooled_width=shapes.of("y_embedder.mlp.0.weight", "time_text_embed.text_embedder.linear_1.weight")[1],
            grid=isqrt(shapes.of("pos_embed", "pos_embed.pos_embed", axes=3)[1]),
            qk_norm=shapes.has(*query_norms),
            dual_layers=tuple(i for i in range(layers) if shapes.has(*(name.format(i) for name in second))),
        )


def _dual_layers(value: object, layers: int) -> tuple[int, ...]:
    """Numbers of blocks before the last one."""
    numbers = tuple(cast(Sequence[int], value)) if isinstance(value, list | tuple) else (-1,)
    if not all(type(n) is int and 0 <= n < layers - 1 for n in numbers):
        wanted = f"whole numbers from 0 to {layers - 2}, below the last of num_layers {layers}"
        raise ValueError(f"{FILE}: dual_attention_layers is {value!r}; it must hold {wanted}")
    return numbers


def _require(entries: Mapping[str, Any], name: str, default: object, allowed: tuple[object, ...]) -> None:
    """Refuses a value that makes another network."""
    value = entries.get(name, default)
    if value not in allowed:
        wanted = " or ".join(repr(each) for each in allowed)
        raise ValueError(f"{FILE}: {name} is {value!r}; only {wanted} can be used here")
