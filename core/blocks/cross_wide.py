"""The cross-attention block as LTX-Video has it: norms are without weights and means, tokens attend to states as they
are, and the rotary tables are as wide as all heads together, each of which has its own part.

Legend: B rows, L tokens, H heads, D width.
"""

from torch import Tensor

from ..norms import RMSNorm
from ..rotary import turned
from ..stream import BlockInputs, Cache
from .cross import CrossBlock, CrossConfig, SelfAttention, by_head
from .joint import attend_turned


class WideCrossBlock(CrossBlock):
    """x += after(attention(before(rms(x)))), x += crossed(x), x += after(mlp(before(rms(x)))).

    Modulations and precision are those of `CrossBlock`; its config says that there is no norm before the states.
    """

    def __init__(self, config: CrossConfig) -> None:
        super().__init__(config)
        self.norm = RMSNorm(config.width, eps=config.norm_eps, affine=False)
        self.attention = WideSelfAttention(config)


class WideSelfAttention(SelfAttention):
    """Attention among all tokens, whose queries and keys are normalised, and turned, over all heads together."""

    def forward(self, h: Tensor, prepared: BlockInputs, cache: Cache, i: int) -> Tensor:
        """[B, L, D] to [B, L, D]."""
        kinds = self.qkv(h).unflatten(-1, (3, -1)).transpose(1, 2)  # [B, 3, L, D]
        queries_keys = by_head(turned(self._normed(kinds[:, :2]), prepared.of(i).rotary), self.heads)
        return self.output(attend_turned(queries_keys, by_head(kinds[:, 2:], self.heads), prepared, cache, i))
