"""What HunyuanVideo 1.5 makes of texts and pictures before its blocks read them.

Legend: B rows, L tokens, H heads, D width, Dh width of a head, Dg width of ByT5's states.
"""

from torch import Tensor, nn
from torch.nn import functional

from ..core.attention.base import AttentionCall, AttentionMask, AttentionSelector
from ..core.mlp import gelu
from ..core.norms import LayerNorm
from .hunyuan_video_config import NORM_EPS

PROJECTION_NORM_EPS = 1e-5


class RefinerBlock(nn.Module):
    """x += gate attention(norm(x)), then the same with the MLP; gates alone depend on time."""

    def __init__(self, heads: int, head_width: int) -> None:
        super().__init__()
        width = heads * head_width
        self.heads = heads
        self.norm = LayerNorm(width, eps=NORM_EPS)
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.mlp_norm = LayerNorm(width, eps=NORM_EPS)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(
        self, x: Tensor, gates: tuple[Tensor, Tensor], mask: AttentionMask, attention: AttentionSelector
    ) -> Tensor:
        """[B, L, D] to [B, L, D]; the gates of attention and MLP are [B, 1, D] each."""
        x = x + gates[0] * self._attended(self.norm(x), mask, attention)
        return x + gates[1] * self.down(functional.silu(self.up(self.mlp_norm(x))))

    def _attended(self, h: Tensor, mask: AttentionMask, attention: AttentionSelector) -> Tensor:
        queries, keys, values = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scale = queries.shape[-1] ** -0.5
        call = AttentionCall(queries=queries, keys=keys, values=values, mask=mask, scale=scale)
        return self.output(attention(call).transpose(1, 2).flatten(2))


class GlyphProjection(nn.Module):
    """third(gelu(second(gelu(first(norm(states))))))."""

    def __init__(self, width: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.norm = LayerNorm(width, eps=PROJECTION_NORM_EPS)
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.third = nn.Linear(hidden, width_out)

    def forward(self, states: Tensor) -> Tensor:
        """[B, L, Dg] to [B, L, D]."""
        h = gelu(self.first(self.norm(states)), "none")
        return self.third(gelu(self.second(h), "none"))
