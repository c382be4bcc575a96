"""The single parallel block: attention and MLP side by side over one stream of all tokens (the single
blocks of FLUX.1 and FLUX.2).

Legend: B rows, L tokens, D width.
"""

from typing import cast

from torch import Tensor, nn

from ..norms import LayerNorm, RMSNorm
from ..ops.row_product import WideLinear, add_wide_product, wide_linear
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
        self.inner = WideLinear(width, 3 * width + self.mlp_width, bias=config.bias)
        self.query_norm = RMSNorm(config.head_width, eps=config.norm_eps)
        self.key_norm = RMSNorm(config.head_width, eps=config.norm_eps)
        self.output = WideLinear(width + config.hidden, width, bias=config.bias)

    def forward(self, stream: Stream, prepared: BlockInputs, cache: Cache, i: int) -> Stream:
        """The stream after this block; `i` is its index in the stack."""
        (modulation,) = prepared.modulation[i]
        h = modulation.before(self.norm(stream.x))
        attended, hidden = self._attended(h, prepared, cache, i), self._hidden(h)
        x = within_float16(stream.x + modulation.after(self._joined(attended, hidden)))
        return Stream(x=x, context=stream.context)

    def _attended(self, h: Tensor, prepared: BlockInputs, cache: Cache, i: int) -> Tensor:
        """Attention of the tokens [B, L, D] to each other, [B, L, D]."""
        qkv = _rows_of(self.inner, slice(None, 3 * self.config.width), h)
        return attend(*split_heads(qkv, self.config.heads, self.query_norm, self.key_norm), prepared, cache, i)

    def _hidden(self, h: Tensor) -> Tensor:
        """The MLP's hidden values, [B, L, D] to [B, L, hidden]."""
        return self.config.mlp.activated(_rows_of(self.inner, slice(3 * self.config.width, None), h))

    def _joined(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """output([attended, hidden]), which are never put side by side: [B, L, D]."""
        width = self.config.width
        out = wide_linear(attended, self.output.weight[:, :width], self.output.bias)
        return add_wide_product(out, hidden, self.output.weight[:, width:])


def _rows_of(layer: nn.Linear, rows: slice, h: Tensor) -> Tensor:
    """Some of a linear layer's outputs."""
    bias = cast("Tensor | None", layer.bias)
    return wide_linear(h, layer.weight[rows], None if bias is None else bias[rows])
