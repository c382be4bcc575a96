"""The cross-attention block: tokens attend to each other, then to states that never change: those of a text, and of
pictures where the model reads them (Wan).

Legend: B rows, L tokens, Lc states, H heads, D width, Dh width of a head, n kinds of heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..attention.base import AttentionCall
from ..mlp import GELUMLP
from ..modulation import Modulation
from ..norms import LayerNorm, RMSNorm, norm_halves
from ..ops.row_product import WideLinear
from ..stream import BlockInputs, Cache, Stream
from .joint import attend


@dataclass(frozen=True, kw_only=True)
class CrossConfig:
    """Sizes of one block; D = heads * head_width. `cross_norm`: tokens are normalised before they attend to states.
    `qk_norm_eps` is that of the norms of queries and keys (None: `norm_eps`)."""

    heads: int
    head_width: int
    hidden: int
    norm_eps: float = 1e-6
    cross_norm: bool = True
    qk_norm_eps: float | None = None

    @property
    def width(self) -> int:
        """D."""
        return self.heads * self.head_width

    @property
    def qk_eps(self) -> float:
        """That of the norms of queries and keys."""
        return self.norm_eps if self.qk_norm_eps is None else self.qk_norm_eps


class CrossBlock(nn.Module):
    """x += after(attention(before(norm(x)))), x += crossed(norm(x)), x += after(mlp(before(norm(x)))).

    Its two modulations are those of attention and MLP. Norms and modulations, and the sums where a modulation is of
    float32, are computed in float32 whatever x is in.
    """

    def __init__(self, config: CrossConfig) -> None:
        super().__init__()
        width, eps = config.width, config.norm_eps
        self.norm = LayerNorm(width, eps=eps, affine=False)
        self.attention = SelfAttention(config)
        self.cross_norm = LayerNorm(width, eps=eps) if config.cross_norm else nn.Identity()
        self.cross = CrossAttention(config)
        self.mlp = GELUMLP(width, config.hidden)

    def forward(self, stream: Stream, prepared: BlockInputs, cache: Cache, i: int) -> Stream:
        """The stream after this block; `i` is its index in the stack."""
        x, (attention, mlp) = stream.x, prepared.modulation[i]
        h = self.attention(self._before(attention, x), prepared, cache, i)
        x = (x + attention.after(h)).to(x.dtype)
        x = x + self.cross(self.cross_norm(x), prepared, i)
        x = (x + mlp.after(self.mlp(self._before(mlp, x)))).to(x.dtype)
        return Stream(x=x, context=stream.context)

    def _before(self, modulation: Modulation, x: Tensor) -> Tensor:
        """A sublayer's input [B, L, D], in x's dtype."""
        return modulation.before(self.norm(x.float())).to(x.dtype)


class SelfAttention(nn.Module):
    """Attention among all tokens, whose queries and keys are normalised over all heads together."""

    def __init__(self, config: CrossConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = WideLinear(config.width, 3 * config.width)
        self.query_norm = RMSNorm(config.width, eps=config.qk_eps)
        self.key_norm = RMSNorm(config.width, eps=config.qk_eps)
        self.output = WideLinear(config.width, config.width)

    def forward(self, h: Tensor, prepared: BlockInputs, cache: Cache, i: int) -> Tensor:
        """[B, L, D] to [B, L, D]."""
        kinds = self.qkv(h).unflatten(-1, (3, -1)).transpose(1, 2)  # [B, 3, L, D]
        queries_keys = by_head(self._normed(kinds[:, :2]), self.heads)
        return self.output(attend(queries_keys, by_head(kinds[:, 2:], self.heads), prepared, cache, i))

    def _normed(self, queries_keys: Tensor) -> Tensor:
        """[B, 2, L, D] to the same, in memory that has both of a token side by side."""
        if torch.is_grad_enabled():
            queries, keys = queries_keys.chunk(2, dim=1)
            return torch.cat((self.query_norm(queries), self.key_norm(keys)), dim=1)
        normed = torch.empty_like(queries_keys.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        norm_halves(queries_keys, self.query_norm, self.key_norm, normed)
        return normed


class CrossAttention(nn.Module):
    """Attention of tokens to each of what `prepared.crossed[i]` holds, added up. Whoever prepares the run makes those
    keys and values: they are the same at every step."""

    def __init__(self, config: CrossConfig) -> None:
        super().__init__()
        self.config = config
        self.query = WideLinear(config.width, config.width)
        self.query_norm = RMSNorm(config.width, eps=config.qk_eps)
        self.output = WideLinear(config.width, config.width)

    def forward(self, h: Tensor, prepared: BlockInputs, i: int) -> Tensor:
        """[B, L, D] to [B, L, D]."""
        queries = by_head(self.query_norm(self.query(h))[:, None], self.config.heads)
        scale = self.config.head_width**-0.5
        first, *others = (
            AttentionCall(
                queries=queries,
                keys=each.keys.to(queries.dtype),
                values=each.values.to(queries.dtype),
                mask=each.mask,
                scale=scale,
            )
            for each in prepared.crossed[i]
        )
        out = prepared.attention(first)
        for call in others:
            out = out + prepared.attention(call)
        return self.output(out.transpose(1, 2).flatten(2))


def by_head(x: Tensor, heads: int) -> Tensor:
    """[B, n, L, D] to [B, n H, L, Dh]; a view where n is 1, or all kinds of a token lie side by side."""
    return x.unflatten(-1, (heads, -1)).transpose(2, 3).flatten(1, 2)
