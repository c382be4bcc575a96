"""The joint two-stream block: pictures and text keep their own weights and attend to each other (SD3, FLUX.1,
Qwen-Image).

Legend: B rows, L tokens, Lc context tokens, H heads, D width, Dh width of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..attention.base import AttentionCall
from ..mlp import GELU, Feedforward
from ..norms import LayerNorm, RMSNorm, norm_halves
from ..ops.row_product import WideLinear
from ..rotary import turned
from ..stream import BlockInputs, Cache, Stream

FLOAT16_MAX = 65504


@dataclass(frozen=True, kw_only=True)
class JointConfig:
    """Sizes of one block, and what its linear layers are; D = heads * head_width."""

    heads: int
    head_width: int
    hidden: int
    norm_eps: float = 1e-6
    qk_norm: bool = True
    mlp: Feedforward = GELU()  # noqa: RUF009 (immutable)
    bias: bool = True

    @property
    def width(self) -> int:
        """D."""
        return self.heads * self.head_width


class JointBlock(nn.Module):
    """Both streams: x += after(attention(before(norm(x)))), over the tokens of both; then the same with the MLP.

    Its four modulations are those of x's attention and MLP, then of the context's. The context's tokens come after x's,
    in attention and so in the rotary tables and the mask; padding of the context is then at the end. Without a context,
    x attends to itself, with the first two modulations.
    """

    def __init__(self, config: JointConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(config.width, eps=config.norm_eps, affine=False)
        self.x = JointStream(config)
        self.context = JointStream(config)

    def forward(self, stream: Stream, prepared: BlockInputs, cache: Cache, i: int) -> Stream:
        """The stream after this block; `i` is its index in the stack."""
        x, context = stream.x, stream.context
        if context is None:
            return Stream(x=self._alone(x, prepared, cache, i))
        x_attention, x_mlp, context_attention, context_mlp = prepared.modulation[i]
        mine, theirs = x_attention.before(self.norm(x)), context_attention.before(self.norm(context))
        mine, theirs = self._attend(mine, theirs, prepared, cache, i)
        x, context = x + x_attention.after(mine), context + context_attention.after(theirs)
        x = x + x_mlp.after(self.x.mlp(x_mlp.before(self.norm(x))))
        context = context + context_mlp.after(self.context.mlp(context_mlp.before(self.norm(context))))
        return Stream(x=within_float16(x), context=within_float16(context))

    def _alone(self, x: Tensor, prepared: BlockInputs, cache: Cache, i: int) -> Tensor:
        """x without a context, [B, L, D]."""
        attention, mlp = prepared.modulation[i][:2]
        attended = attend(*self.x.heads(attention.before(self.norm(x))), prepared, cache, i)
        x = x + attention.after(self.x.output(attended))
        return within_float16(x + mlp.after(self.x.mlp(mlp.before(self.norm(x)))))

    def _attend(self, x: Tensor, context: Tensor, prepared: BlockInputs, cache: Cache, i: int) -> tuple[Tensor, Tensor]:
        """Attention of the tokens of both, [B, L, D] and [B, Lc, D] to the same."""
        mine, theirs = attend_together((self.x, self.context), (x, context), prepared, cache, i)
        return self.x.output(mine), self.context.output(theirs)


class JointHeads(nn.Module):
    """Queries, keys and values of one stream, as one matrix, in this order."""

    def __init__(self, config: JointConfig) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.qkv = WideLinear(width, 3 * width, bias=config.bias)
        self.query_norm = RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def heads(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Queries then keys [B, 2 H, L, Dh], normalised, and values [B, H, L, Dh]."""
        return split_heads(self.qkv(h), self.config.heads, self.query_norm, self.key_norm)

    def heads_into(self, h: Tensor, queries_keys: Tensor, values: Tensor) -> None:
        """`heads`, written to tensors of their shapes. No gradient follows."""
        not_normed, mine = _by_kind(self.qkv(h), self.config.heads)
        norm_halves(not_normed, self.query_norm, self.key_norm, queries_keys)
        values.copy_(mine)


class JointStream(JointHeads):
    """What one of the two streams has of its own."""

    def __init__(self, config: JointConfig) -> None:
        super().__init__(config)
        self.output = WideLinear(config.width, config.width, bias=config.bias)
        self.mlp = config.mlp.build(config.width, config.hidden, bias=config.bias)


def attend_together(
    streams: tuple[JointHeads, JointHeads], h: tuple[Tensor, Tensor], prepared: BlockInputs, cache: Cache, i: int
) -> tuple[Tensor, Tensor]:
    """Attention over the tokens of two streams, x's L and the context's Lc: [B, L, D], [B, Lc, D] to the same."""
    queries_keys, values = heads_together(streams, h)
    joined = attend(queries_keys, values, prepared, cache, i)
    mine, theirs = joined.split((h[0].shape[1], h[1].shape[1]), dim=1)
    return mine, theirs


def heads_together(streams: tuple[JointHeads, JointHeads], h: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Queries then keys [B, 2 H, L + Lc, Dh] and values [B, H, L + Lc, Dh] of the tokens of both."""
    if torch.is_grad_enabled():
        queries_keys, values = zip(*(stream.heads(each) for stream, each in zip(streams, h, strict=True)), strict=True)
        return torch.cat(queries_keys, dim=2), torch.cat(values, dim=2)
    config, lengths = streams[0].config, [each.shape[1] for each in h]
    values = h[0].new_empty(len(h[0]), config.heads, sum(lengths), config.head_width)
    queries_keys = h[0].new_empty(len(h[0]), 2 * config.heads, sum(lengths), config.head_width)
    places = zip(queries_keys.split(lengths, dim=2), values.split(lengths, dim=2), strict=True)
    for stream, each, place in zip(streams, h, places, strict=True):
        stream.heads_into(each, *place)
    return queries_keys, values


def attend(queries_keys: Tensor, values: Tensor, prepared: BlockInputs, cache: Cache, i: int) -> Tensor:
    """Attention of queries then keys [B, 2 H, L, Dh] and values [B, H, L, Dh], as `split_heads` gives them: turned by
    the rotary tables of block `i` (in their own memory), over what the cache gives back, [B, L, D]."""
    return attend_turned(turned(queries_keys, prepared.of(i).rotary), values, prepared, cache, i)


def attend_turned(queries_keys: Tensor, values: Tensor, prepared: BlockInputs, cache: Cache, i: int) -> Tensor:
    """`attend` for queries and keys that are turned already."""
    queries, keys = queries_keys.chunk(2, dim=1)
    keys, values = cache.update(i, keys, values)
    scale = queries.shape[-1] ** -0.5
    call = AttentionCall(queries=queries, keys=keys, values=values, mask=prepared.of(i).mask, scale=scale)
    return prepared.attention(call).transpose(1, 2).flatten(2)


def within_float16(x: Tensor) -> Tensor:
    """Where x is float16: clipped to its finite range, as the reference does with what overflows."""
    return x.clamp(-FLOAT16_MAX, FLOAT16_MAX) if x.dtype is torch.float16 else x


def split_heads(qkv: Tensor, heads: int, query_norm: nn.Module, key_norm: nn.Module) -> tuple[Tensor, Tensor]:
    """[B, L, 3 D] to queries then keys [B, 2 H, L, Dh], normalised per head, and values [B, H, L, Dh]."""
    queries_keys, values = _by_kind(qkv, heads)
    if torch.is_grad_enabled():
        queries, keys = queries_keys.chunk(2, dim=1)
        return torch.cat((query_norm(queries), key_norm(keys)), dim=1), values
    normed = torch.empty_like(queries_keys, memory_format=torch.contiguous_format)
    norm_halves(queries_keys, query_norm, key_norm, normed)
    return normed, values


def _by_kind(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """[B, L, 3 D] to queries then keys [B, 2 H, L, Dh] and values [B, H, L, Dh], as views."""
    queries_keys, values = qkv.unflatten(-1, (3 * heads, -1)).transpose(1, 2).split((2 * heads, heads), dim=1)
    return queries_keys, values
