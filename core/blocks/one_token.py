"""A runner for decoding: a whole stack of self-attention blocks on one new token of each row, in one call.

It computes what the blocks compute one after the other, on a CPU; where it cannot (other parts in a block, another
cache, more tokens, masks), they do run one after the other.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..attention.base import AttentionSelector
from ..attention.one_query import OneQueryAttention
from ..mlp import GatedMLP
from ..norms import RMSNorm
from ..ops import kernels
from ..ops.kernels import BlockTable, TokenPlaces
from ..ops.packed import PackedLinear
from ..ops.packed_matrix import OurKernel
from ..ops.row_product import Linear
from ..rotary import Rotary
from ..stream import Block, BlockInputs, Cache, Stream, run_blocks
from .decoder import DecoderBlock


@runtime_checkable
class Placing(Protocol):
    """A cache that can tell where one new token of each row goes."""

    def place_token(self) -> TokenPlaces | None:
        """Make room for one token of each row, which `advance` then counts; None where its layout does not allow it."""
        ...


class OneTokenRunner:
    """Runs the stack that it was made for. Its parts are looked up once: it is to be made anew when they may have been
    replaced."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = tuple(blocks)
        self._table = _table(self._blocks) if kernels.IS_BUILT else None

    def __call__(self, blocks: Sequence[Block], stream: Stream, prepared: BlockInputs, cache: Cache) -> Stream:
        """The stream after all blocks."""
        table, rotary, x = self._table, prepared.rotary, stream.x
        if table is None or rotary is None or not self._suits(stream, prepared, rotary, len(blocks)):
            return run_blocks(blocks, stream, prepared, cache)
        places = cache.place_token() if isinstance(cache, Placing) else None
        if places is None or not table.fits(x, rotary.cos, places):
            return run_blocks(blocks, stream, prepared, cache)
        after = x.to(torch.float32, copy=True).contiguous()
        kernels.one_token(table, after, *rotary.tables, places)
        return Stream(x=after.to(x.dtype), context=stream.context)

    def _suits(self, stream: Stream, prepared: BlockInputs, rotary: Rotary, count: int) -> bool:
        x, mask = stream.x, prepared.mask
        if (
            x.shape[1] != 1
            or not 0 < len(x) <= kernels.MOST_ROWS
            or x.dtype not in kernels.KINDS
            or not kernels.may_run(x)
        ):
            return False
        if prepared.modulation or prepared.special or prepared.routing is not None or mask.window is not None:
            return False
        return count == len(self._blocks) and rotary.pairing == "half" and _takes_ours(prepared.attention)


def _takes_ours(attention: AttentionSelector) -> bool:
    """Whether one query a row goes to our kernel; a backend asked for by name is obeyed."""
    return isinstance(attention.backends[0], OneQueryAttention)


def _table(blocks: Sequence[nn.Module]) -> BlockTable | None:
    """None if a block has a part that the kernel does not know, or is watched by hooks."""
    addresses: list[list[int]] = []
    reals: list[list[float]] = []
    kept: list[Tensor] = []
    for block in blocks:
        found = _parts(block)
        if found is None:
            return None
        matrices, norms, numbers = found
        addresses.append([each for matrix in matrices for each in _matrix(matrix, kept)])
        addresses[-1] += [_norm(norm, kept) for norm in norms]
        reals.append(numbers)
    first = blocks[0]
    assert isinstance(first, DecoderBlock)
    config = first.attention.config
    return BlockTable(
        addresses=torch.tensor(addresses, dtype=torch.int64, device="cpu"),
        reals=torch.tensor(reals, dtype=torch.float32, device="cpu"),
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        hidden=config.hidden,
        kept=tuple(kept),
    )


_Matrix = Linear | PackedLinear
_Parts = tuple[list[_Matrix], list[RMSNorm | None], list[float]]


def _parts(block: nn.Module) -> _Parts | None:
    """A block's matrices, norms and epsilons, if they are all that it has."""
    if type(block) is not DecoderBlock or block.sandwich or type(block.mlp) is not GatedMLP or _has_hooks(block):
        return None
    attention, mlp = block.attention, block.mlp
    if mlp.activation != "silu" or attention.config.head_width % 8:
        return None
    matrices = [_matrix_of(each) for each in (attention.qkv, attention.output, mlp.gate_up, mlp.down)]
    around = [_norm_of(each) for each in (block.attention_norm, block.mlp_norm)]
    heads = [_norm_of(each) for each in (attention.query_norm, attention.key_norm)] if attention.config.qk_norm else []
    known = [each for each in matrices if each is not None]
    norms = [each for each in (*around, *heads) if each is not None]
    if len(known) < len(matrices) or len(norms) < len(around) + len(heads):
        return None
    eps = [norms[0].eps, norms[-1].eps, attention.scale]
    return known, [*norms, *([None, None] if not heads else [])], eps


def _matrix_of(layer: nn.Module) -> _Matrix | None:
    """The layer, if its weight is one that the kernel multiplies by."""
    if type(layer) is PackedLinear:
        return layer if isinstance(layer.matrix, OurKernel) else None
    if type(layer) is not Linear:
        return None
    weight = layer.weight
    return layer if weight.is_cpu and weight.dtype in kernels.KINDS and weight.is_contiguous() else None


def _norm_of(norm: nn.Module) -> RMSNorm | None:
    return norm if type(norm) is RMSNorm and norm.weight is not None and norm.weight.is_cpu else None


def _has_hooks(block: nn.Module) -> bool:
    hooks = ((each._forward_hooks, each._forward_pre_hooks) for each in block.modules())  # pyright: ignore[reportPrivateUsage]
    return any(before or after for after, before in hooks)


def _matrix(layer: _Matrix, kept: list[Tensor]) -> list[int]:
    """`Matrix` of native.h: kind, weight, scales, bias, size, width."""
    bias = None if layer.bias is None else layer.bias.detach().float().contiguous()
    if isinstance(layer, PackedLinear):
        assert isinstance(layer.matrix, OurKernel)
        kind, tensors = layer.matrix.kind, (layer.matrix.numbers, layer.matrix.scales, bias)
    else:
        kind, tensors = kernels.KINDS[layer.weight.dtype], (layer.weight.detach(), None, bias)
    kept += [each for each in tensors if each is not None]
    where = [0 if each is None else each.data_ptr() for each in tensors]
    return [kernels.KIND_NUMBERS[kind], *where, layer.out_features, layer.in_features]


def _norm(norm: RMSNorm | None, kept: list[Tensor]) -> int:
    """The address of what a norm multiplies by, 0 where there is none."""
    if norm is None or norm.weight is None:
        return 0
    weight = norm.weight.detach().float()
    kept.append((weight + norm.offset if norm.offset else weight).contiguous())
    return kept[-1].data_ptr()
