"""The self-attention block: language models, and single-stream denoisers such as plate and Z-Image.

Legend: B rows, L tokens, H query heads, Hkv key/value heads, D width, Dh width of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..attention.base import AttentionCall
from ..mlp import Activation, GatedMLP
from ..moe import ExpertsConfig, MixtureOfExperts
from ..norms import RMSNorm
from ..ops.row_product import Linear
from ..rotary import apply_rotary
from ..stream import BlockInputs, Cache, Stream


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of one block.

    `qk_norm` normalises each head's queries and keys, with an epsilon of its own where `qk_norm_eps` is given;
    `sandwich` also normalises each sublayer's output; norms multiply by weight + `norm_offset`; `qkv_bias` adds
    biases to queries, keys and values, `bias` to the attention's output and the MLP; scores are multiplied by
    `attention_scale` (None: head_width^-0.5); `experts` replace the MLP.
    """

    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    qk_norm: bool = False
    qk_norm_eps: float | None = None
    sandwich: bool = False
    qkv_bias: bool = False
    bias: bool = False
    activation: Activation = "silu"
    attention_scale: float | None = None
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads cannot share {self.kv_heads} key/value heads; heads must be a multiple"
            )

    def norm(self, width: int) -> RMSNorm:
        """A new norm of this block."""
        return RMSNorm(width, eps=self.norm_eps, offset=self.norm_offset)

    def head_norm(self) -> nn.Module:
        """A new norm of each head's queries or keys, where there is one."""
        eps = self.norm_eps if self.qk_norm_eps is None else self.qk_norm_eps
        return RMSNorm(self.head_width, eps=eps, offset=self.norm_offset) if self.qk_norm else nn.Identity()


class DecoderBlock(nn.Module):
    """x += after(attention(before(norm(x)))), then the same with the MLP or the experts."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.width
        self.sandwich = config.sandwich
        self.attention_norm = config.norm(width)
        self.attention = SelfAttention(config)
        self.attention_post_norm = config.norm(width) if config.sandwich else nn.Identity()
        self.mlp_norm = config.norm(width)
        self.mlp = _feed_forward(config)
        self.mlp_post_norm = config.norm(width) if config.sandwich else nn.Identity()

    def forward(self, stream: Stream, prepared: BlockInputs, cache: Cache, i: int) -> Stream:
        """The stream after this block; `i` is its index in the stack."""
        x = stream.x
        around = prepared.modulation[i] if prepared.modulation else None
        h = self.attention_norm(x)
        h = self.attention(h if around is None else around[0].before(h), prepared, cache, i)
        h = self.attention_post_norm(h) if self.sandwich else h
        x = prepared.kept(x) + (h if around is None else around[0].after(h))
        h = self.mlp_norm(x)
        h = self._feed(h if around is None else around[1].before(h), prepared, i)
        h = self.mlp_post_norm(h) if self.sandwich else h
        return Stream(x=x + (h if around is None else around[1].after(h)), context=stream.context)

    def _feed(self, h: Tensor, prepared: BlockInputs, i: int) -> Tensor:
        mlp = self.mlp
        return mlp(h, prepared.routing, i) if isinstance(mlp, MixtureOfExperts) else mlp(h)


def _feed_forward(config: DecoderConfig) -> GatedMLP | MixtureOfExperts:
    if config.experts is not None:
        return MixtureOfExperts(config.width, config.experts, activation=config.activation)
    return GatedMLP(config.width, config.hidden, bias=config.bias, activation=config.activation)


class SelfAttention(nn.Module):
    """Attention over one stream; queries, keys and values are one matrix, in this order."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.scale = config.head_width**-0.5 if config.attention_scale is None else config.attention_scale
        num_heads = config.heads + 2 * config.kv_heads
        self.qkv = Linear(config.width, num_heads * config.head_width, bias=config.qkv_bias)
        self.output = Linear(config.heads * config.head_width, config.width, bias=config.bias)
        self.query_norm = config.head_norm()
        self.key_norm = config.head_norm()

    def forward(self, x: Tensor, prepared: BlockInputs, cache: Cache, i: int) -> Tensor:
        """[B, L, D] to [B, L, D], or to those of them that are kept."""
        rows, length, _ = x.shape
        here, config = prepared.of(i), self.config
        apart = (config.heads, config.kv_heads)
        heads = self.qkv(x).view(rows, length, -1, config.head_width).transpose(1, 2)
        turned, values = heads.split_with_sizes((sum(apart), config.kv_heads), dim=1)  # queries and keys turn together
        if config.qk_norm:
            queries, keys = turned.split_with_sizes(apart, dim=1)
            turned = torch.cat((self.query_norm(queries), self.key_norm(keys)), dim=1)
        queries, keys = apply_rotary(turned, here.rotary).split_with_sizes(apart, dim=1)
        keys, values = cache.update(i, keys, values)
        call = AttentionCall(queries=queries, keys=keys, values=values, mask=here.mask, scale=self.scale)
        return self.output(prepared.kept(prepared.attention(call).transpose(1, 2).reshape(rows, length, -1)))
