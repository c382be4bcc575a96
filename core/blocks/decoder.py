"""The self-attention block: language models, and single-stream denoisers such as plate and Z-Image.

Legend: B rows, L tokens, H query heads, Hkv key/value heads, D width, Dh width of a head.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from ..attention.base import AttentionCall
from ..mlp import SwiGLU
from ..modulation import Modulation, Unmodulated
from ..norms import RMSNorm
from ..rotary import apply_rotary
from ..stream import BlockInputs, Cache, Stream

_UNMODULATED = (Unmodulated(), Unmodulated())


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of one block.

    `qk_norm` normalises each head's queries and keys; `sandwich` also normalises each sublayer's output; `qkv_bias`
    adds the only bias there is.
    """

    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    norm_eps: float = 1e-6
    qk_norm: bool = False
    sandwich: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads cannot share {self.kv_heads} key/value heads; heads must be a multiple"
            )


class DecoderBlock(nn.Module):
    """x += after(attention(before(norm(x)))), then the same with the MLP."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, eps = config.width, config.norm_eps
        self.attention_norm = RMSNorm(width, eps=eps)
        self.attention = SelfAttention(config)
        self.attention_post_norm = RMSNorm(width, eps=eps) if config.sandwich else nn.Identity()
        self.mlp_norm = RMSNorm(width, eps=eps)
        self.mlp = SwiGLU(width, config.hidden)
        self.mlp_post_norm = RMSNorm(width, eps=eps) if config.sandwich else nn.Identity()

    def forward(self, stream: Stream, prepared: BlockInputs, cache: Cache, i: int) -> Stream:
        """The stream after this block; `i` is its index in the stack."""
        around: tuple[Modulation, ...] = tuple(prepared.modulation[i]) if prepared.modulation else _UNMODULATED
        x = stream.x
        h = self.attention(around[0].before(self.attention_norm(x)), prepared, cache, i)
        x = x + around[0].after(self.attention_post_norm(h))
        h = self.mlp(around[1].before(self.mlp_norm(x)))
        return Stream(x=x + around[1].after(self.mlp_post_norm(h)), context=stream.context)


class SelfAttention(nn.Module):
    """Attention over one stream; queries, keys and values are one matrix, in this order."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.widths = [n * config.head_width for n in (config.heads, config.kv_heads, config.kv_heads)]
        self.qkv = nn.Linear(config.width, sum(self.widths), bias=config.qkv_bias)
        self.output = nn.Linear(self.widths[0], config.width, bias=False)
        self.query_norm = RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, prepared: BlockInputs, cache: Cache, i: int) -> Tensor:
        """[B, L, D] to [B, L, D]."""
        queries, keys, values = (self._heads(part) for part in self.qkv(x).split(self.widths, dim=-1))
        queries = apply_rotary(self.query_norm(queries), prepared.rotary)
        keys = apply_rotary(self.key_norm(keys), prepared.rotary)
        keys, values = cache.update(i, keys, values)
        call = AttentionCall(
            queries=queries, keys=keys, values=values, mask=prepared.mask, scale=self.config.head_width**-0.5
        )
        return self.output(prepared.attention(call).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_width)).transpose(1, 2)
