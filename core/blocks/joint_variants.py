"""SD3's variants of the joint block: those that attend among the picture's tokens once more (SD3.5 medium), and the
last one, after which nobody reads the context.

Legend: B rows, L tokens, D width.
"""

from torch import Tensor, nn

from ..attention.base import FULL, AttentionCall
from ..norms import LayerNorm
from ..ops.row_product import WideLinear
from ..stream import BlockInputs, Cache, Stream
from .joint import JointBlock, JointConfig, JointHeads, JointStream, attend_together, within_float16


class DualJointBlock(JointBlock):
    """A joint block whose x also attends to itself alone: both attentions read the same x, their results are added.

    Its five modulations are those of x's attention, MLP and second attention, then of the context's attention and MLP.
    Neither a mask nor a cache reaches the second attention: x has no padding.
    """

    def __init__(self, config: JointConfig) -> None:
        super().__init__(config)
        self.alone = SelfAttention(config)

    def forward(self, stream: Stream, prepared: BlockInputs, cache: Cache, i: int) -> Stream:
        """The stream after this block; `i` is its index in the stack."""
        x, context = both_of(stream)
        x_attention, x_mlp, x_alone, context_attention, context_mlp = prepared.modulation[i]
        normed = self.norm(x)
        mine, theirs = x_attention.before(normed), context_attention.before(self.norm(context))
        alone = self.alone(x_alone.before(normed), prepared)
        mine, theirs = self._attend(mine, theirs, prepared, cache, i)
        x = x + x_attention.after(mine) + x_alone.after(alone)
        context = context + context_attention.after(theirs)
        x = x + x_mlp.after(self.x.mlp(x_mlp.before(self.norm(x))))
        context = context + context_mlp.after(self.context.mlp(context_mlp.before(self.norm(context))))
        return Stream(x=within_float16(x), context=within_float16(context))


class LastJointBlock(nn.Module):
    """A joint block that changes x alone; the context is attended to, then left out of the stream.

    Its three modulations are those of x's attention and MLP, and of the context, which is only read.
    """

    def __init__(self, config: JointConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(config.width, eps=config.norm_eps, affine=False)
        self.x = JointStream(config)
        self.context = JointHeads(config)

    def forward(self, stream: Stream, prepared: BlockInputs, cache: Cache, i: int) -> Stream:
        """The stream after this block; `i` is its index in the stack."""
        x, context = both_of(stream)
        x_attention, x_mlp, context_attention = prepared.modulation[i]
        normed = x_attention.before(self.norm(x)), context_attention.before(self.norm(context))
        attended, _ = attend_together((self.x, self.context), normed, prepared, cache, i)
        x = x + x_attention.after(self.x.output(attended))
        return Stream(x=within_float16(x + x_mlp.after(self.x.mlp(x_mlp.before(self.norm(x))))))


class SelfAttention(JointHeads):
    """Attention among all tokens of one stream, and its output layer."""

    def __init__(self, config: JointConfig) -> None:
        super().__init__(config)
        self.output = WideLinear(config.width, config.width, bias=config.bias)

    def forward(self, h: Tensor, prepared: BlockInputs) -> Tensor:
        """[B, L, D] to [B, L, D]."""
        queries_keys, values = self.heads(h)
        queries, keys = queries_keys.chunk(2, dim=1)
        scale = self.config.head_width**-0.5
        call = AttentionCall(queries=queries, keys=keys, values=values, mask=FULL, scale=scale)
        return self.output(prepared.attention(call).transpose(1, 2).flatten(2))


def both_of(stream: Stream) -> tuple[Tensor, Tensor]:
    """x and the context.

    Raises:
        ValueError: there is no context.
    """
    if stream.context is None:
        raise ValueError("a joint block needs a stream with a context")
    return stream.x, stream.context
