"""The single parallel block: attention and MLP side by side over one stream of all tokens (the single
blocks of FLUX.1 and FLUX.2).

Legend: B rows, L tokens, D width.
"""

import torch
from torch import nn

from ..norms import LayerNorm, RMSNorm
from ..stream import BlockInputs, Cache, Stream
from .joint import JointConfig, attend, split_heads, within_float16


class ParallelBlock(nn.Module):
    """x += after(output([attention(h), activated(mlp(h))])) with h = before(norm(x)); one modulation.

    `inner` is queries, keys, values and the MLP's first layer as one matrix, in this order.
    """

    def __init__(self, config: JointConfig) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.norm = LayerNorm(width, eps=config.norm_eps, affine=False)
        self.mlp_width = config.mlp.inner_width(config.hidden)
        self.inner = nn.Linear(width, 3 * width + self.mlp_width, bias=config.bias)
        self.query_norm = RMSNorm(config.head_width, eps=config.norm_eps)
        self.key_norm = RMSNorm(config.head_width, eps=config.norm_eps)
        self.output = nn.Linear(width + config.hidden, width, bias=config.bias)

    def forward(self, stream: Stream, prepared: BlockInputs, cache: Cache, i: int) -> Stream:
        """The stream after this block; `i` is its index in the stack."""
        (modulation,) = prepared.modulation[i]
        qkv, hidden = self.inner(modulation.before(self.norm(stream.x))).split(
            (3 * self.config.width, self.mlp_width), dim=-1
        )
        heads = split_heads(qkv, self.config.heads, self.query_norm, self.key_norm)
        attended = attend(*heads, prepared, cache, i)
        joined = torch.cat((attended, self.config.mlp.activated(hidden)), dim=-1)
        x = within_float16(stream.x + modulation.after(self.output(joined)))
        return Stream(x=x, context=stream.context)
