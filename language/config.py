"""The sizes and options of a decoder language model."""

from dataclasses import dataclass
from functools import cached_property

import torch

from ..core.blocks.decoder import DecoderConfig
from ..core.mlp import Activation
from ..core.moe import ExpertsConfig
from ..core.rotary import RotaryConfig, RotaryScaling

_MOST_LAYERS = 2048
_MOST_WEIGHTS = 2**56


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Sizes of a decoder language model; rotary embedding is by halves over one axis, or by `rope_sections`.

    Beside the options of `DecoderConfig`: embeddings are multiplied by `embedding_scale`. Where `window` is set, the
    layers that `sliding` marks (none marked: all) see the last `window` tokens only, with `local_rope_theta` (None:
    `rope_theta`, scaled like the rest) as their rotary base. `experts` replace the MLP but in their dense layers.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    rope_theta: float = 10000.0
    rope_scaling: RotaryScaling | None = None
    rope_sections: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    sandwich: bool = False
    activation: Activation = "silu"
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    window: int | None = None
    sliding: tuple[bool, ...] = ()
    experts: ExpertsConfig | None = None
    context_length: int = 2048
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        self._check_sizes()
        if self.sliding and len(self.sliding) != self.layers:
            raise ValueError(f"sliding marks {len(self.sliding)} layers; this model has {self.layers}")
        if self.window is None and any(self.sliding):
            raise ValueError("sliding layers need a window; it is None")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1, or None")
        if self.local_rope_theta is not None and self.window is None:
            raise ValueError("local_rope_theta belongs to sliding layers; window is None")

    def _check_sizes(self) -> None:
        """Before anything is made of a config, however wrong the file that it comes from."""
        sizes = {
            "vocab_size": self.vocab_size,
            "width": self.width,
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_width": self.head_width,
            "hidden": self.hidden,
            "context_length": self.context_length,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        if self.layers > _MOST_LAYERS:
            raise ValueError(f"layers is {self.layers}; it must be at most {_MOST_LAYERS}")
        rows = max(self.vocab_size, self.hidden, self.heads * self.head_width, self.kv_heads * self.head_width)
        if rows * self.width > _MOST_WEIGHTS:
            raise ValueError(f"a matrix of {rows} x {self.width} weights is larger than any memory")

    def is_sliding(self, i: int) -> bool:
        """Whether layer `i` sees its last `window` tokens only."""
        return self.window is not None and (not self.sliding or self.sliding[i])

    def block(self, i: int) -> DecoderConfig:
        """The sizes of block `i`."""
        return DecoderConfig(
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_width=self.head_width,
            hidden=self.hidden,
            norm_eps=self.norm_eps,
            norm_offset=self.norm_offset,
            qk_norm=self.qk_norm,
            sandwich=self.sandwich,
            qkv_bias=self.qkv_bias,
            activation=self.activation,
            attention_scale=self.attention_scale,
            experts=self.experts if self.experts is not None and self.experts.is_sparse(i) else None,
        )

    @cached_property
    def rotary(self) -> RotaryConfig:
        """The rotary embedding's settings, but for sliding layers with their own."""
        return RotaryConfig(
            axes=(self.head_width,),
            theta=self.rope_theta,
            pairing="half",
            scaling=self.rope_scaling,
            sections=self.rope_sections,
        )

    @cached_property
    def local_rotary(self) -> RotaryConfig:
        """The rotary embedding's settings in sliding layers."""
        if self.local_rope_theta is None:
            return self.rotary
        return RotaryConfig(axes=(self.head_width,), theta=self.local_rope_theta, pairing="half")

    def kv_cache_bytes_per_token(self, dtype: torch.dtype) -> int:
        """The bytes of one token's keys and values over all layers (sliding ones keep no more than `window` tokens)."""
        return 2 * self.layers * self.kv_heads * self.head_width * dtype.itemsize
