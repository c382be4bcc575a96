"""The single parallel block: attention and MLP side by side over one stream of all tokens (FLUX.1's single blocks).

Legend: B rows, L tokens, H heads, D width, Dh width of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..attention.base import AttentionCall
from ..norms import LayerNorm, RMSNorm
from ..rotary import apply_rotary
from ..stream import BlockInputs, Cache, Stream
from .joint import JointConfig, split_heads, within_float16


class ParallelBlock(nn.Module):
    """x += after(output([attention(h), gelu(mlp(h))])) with h = before(norm(x)); one modulation.

    `inner` is queries, keys, values and the MLP's first layer as one matrix, in this order.
    """

    def __init__(self, config: JointConfig) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.scale = config.head_width**-0.5
        self.norm = LayerNorm(width, eps=config.norm_eps, affine=False)
        self.inner = nn.Linear(width, 3 * width + config.hidden)
        self.query_norm = RMSNorm(config.head_width, eps=config.norm_eps)
        self.key_norm = RMSNorm(config.head_width, eps=config.norm_eps)
        self.output = nn.Linear(width + config.hidden, width)

    def forward(self, stream: Stream, prepared: BlockInputs, cache: Cache, i: int) -> Stream:
        """The stream after this block; `i` is its index in the stack."""
        (modulation,) = prepared.modulation[i]
        qkv, hidden = self.inner(modulation.before(self.norm(stream.x))).split(
            (3 * self.config.width, self.config.hidden), dim=-1
        )
        attended = self._attend(qkv, prepared, cache, i)
        joined = torch.cat((attended, functional.gelu(hidden, approximate="tanh")), dim=-1)
        x = within_float16(stream.x + modulation.after(self.output(joined)))
        return Stream(x=x, context=stream.context)

    def _attend(self, qkv: Tensor, prepared: BlockInputs, cache: Cache, i: int) -> Tensor:
        """[B, L, 3 D] to [B, L, D]."""
        here = prepared.of(i)
        queries_keys, values = split_heads(qkv, self.config.heads, self.query_norm, self.key_norm)
        queries, keys = apply_rotary(queries_keys, here.rotary).chunk(2, dim=1)
        keys, values = cache.update(i, keys, values)
        call = AttentionCall(queries=queries, keys=keys, values=values, mask=here.mask, scale=self.scale)
        return prepared.attention(call).transpose(1, 2).flatten(2)
