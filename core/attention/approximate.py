"""Backends that trade exactness for time. None is ever chosen unless it is asked for by name; calls that one does not
take go to the exact ones.

Legend: B rows, H heads, L tokens, F frames, h w rows and columns of tokens, Dh width of a head.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from torch import Tensor

from .base import FULL, AttentionCall, AttentionMask
from .sdpa import SDPAAttention

Box = tuple[slice, slice, slice]


@dataclass(frozen=True, kw_only=True)
class SlidingTileAttention:
    """Tokens of a clip see the tiles around their own (Zhang et al. 2025, "Fast Video Generation with Sliding Tile
    Attention"), and those of a text that come after the clip's.

    A tile has `tile` (frames, rows, columns) tokens, fewer at the far edges; a window has `window` tiles along each
    axis, and is moved inwards at the edges, so that it is as large for every token. A window as large as the clip is
    exact.
    """

    tile: tuple[int, int, int] = (4, 8, 8)
    window: tuple[int, int, int] = (3, 3, 3)

    def __post_init__(self) -> None:
        for name, sizes in (("tile", self.tile), ("window", self.window)):
            if len(sizes) != 3 or min(sizes) < 1:
                raise ValueError(f"{name} is {sizes}; it must be three numbers of at least 1: frames, rows, columns")

    @property
    def name(self) -> str:
        """The name that a user asks for."""
        return "sliding_tile"

    def refuses(self, call: AttentionCall) -> str | None:
        """Anything but the tokens of a clip, and others after them, among themselves."""
        grid = call.mask.grid
        if grid is None:
            return "these are not the tokens of one clip among themselves"
        hides_clip = call.mask.key_lengths is not None and call.queries.shape[2] == prod(grid)
        return "masks of a clip's tokens are not supported" if call.mask.causal or hides_clip else None

    def __call__(self, call: AttentionCall) -> Tensor:
        """[B, H, L, Dh]. Tokens that come after the clip's are seen by all, and see all."""
        grid, lengths = call.mask.grid, call.mask.key_lengths
        assert grid is not None
        count, tensors = prod(grid), (call.queries, call.keys, call.values)
        queries, keys, values = (each[:, :, :count].unflatten(2, grid) for each in tensors)
        more_queries, more_keys, more_values = (each[:, :, count:] for each in tensors)
        out = torch.empty_like(call.queries, memory_format=torch.contiguous_format)
        made, attend = out[:, :, :count].unflatten(2, grid), SDPAAttention()
        for own, around in self._boxes(grid):
            k, v = _tokens(keys, around, more_keys), _tokens(values, around, more_values)
            q, mask = _tokens(queries, own), _shorter(lengths, count - _volume(around))
            part = attend(AttentionCall(queries=q, keys=k, values=v, mask=mask, scale=call.scale))
            made[:, :, *own].copy_(part.view(made[:, :, *own].shape))
        if more_queries.shape[2]:
            out[:, :, count:] = attend(replace(call, queries=more_queries, mask=_shorter(lengths, 0)))
        return out

    def share(self, grid: tuple[int, int, int], others: int = 0) -> float:
        """How much of the whole attention over a grid (F, h, w), and over `others` after it, is computed, 0 to 1."""
        whole = prod(grid) + others
        seen = sum(_volume(own) * (_volume(around) + others) for own, around in self._boxes(grid))
        return (seen + others * whole) / whole**2

    def _boxes(self, grid: tuple[int, int, int]) -> Iterator[tuple[Box, Box]]:
        """Each tile, and its window."""
        axes = [
            [*_spans(length, tile, window)] for length, tile, window in zip(grid, self.tile, self.window, strict=True)
        ]
        for spans in product(*axes):
            (t, around_t), (y, around_y), (x, around_x) = spans
            yield (t, y, x), (around_t, around_y, around_x)


@dataclass(frozen=True, kw_only=True)
class BlockedAttention:
    """softmax(scale q k^T) v in bfloat16 with scores in bfloat16, `block` queries at a time: on CPUs that have such
    products, faster than torch's fused kernel, at two to nine times its error."""

    block: int = 256

    @property
    def name(self) -> str:
        """The name that a user asks for."""
        return "blocked_bfloat16"

    def refuses(self, call: AttentionCall) -> str | None:
        """Anything but bfloat16 on a CPU without masks and gradients."""
        if call.queries.device.type != "cpu":
            return f"no {call.queries.device.type.upper()} kernels"
        if call.queries.dtype is not torch.bfloat16:
            return f"{call.queries.dtype} is not supported; bfloat16 is"
        if not call.mask.sees_all(call.queries.shape[2], call.keys.shape[2]):
            return "masks are not supported"
        if call.queries.shape[1] != call.keys.shape[1]:
            return "shared key/value heads are not supported"
        return "gradients are not supported" if call.needs_gradient else None

    def __call__(self, call: AttentionCall) -> Tensor:
        """[B, H, L, Dh]."""
        queries, keys = call.queries * call.scale, call.keys.transpose(2, 3)
        out = torch.empty_like(call.queries, memory_format=torch.contiguous_format)
        for row in range(queries.shape[0]):
            for head in range(queries.shape[1]):
                for start in range(0, queries.shape[2], self.block):
                    some = slice(start, start + self.block)
                    shares = torch.mm(queries[row, head, some], keys[row, head]).softmax(-1)
                    torch.mm(shares, call.values[row, head], out=out[row, head, some])
        return out


def _spans(length: int, tile: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Along one axis, each tile and its window."""
    count = -(-length // tile)
    for index in range(count):
        first = min(max(0, index - window // 2), max(0, count - window))
        yield (
            slice(index * tile, min(length, (index + 1) * tile)),
            slice(first * tile, min(length, (first + window) * tile)),
        )


def _tokens(x: Tensor, box: Box, others: Tensor | None = None) -> Tensor:
    """Those of [B, H, F, h, w, Dh] in a box, [B, H, L, Dh], and the others after them."""
    found = x[:, :, *box].flatten(2, 4)
    return found if others is None or not others.shape[2] else torch.cat((found, others), dim=2)


def _shorter(lengths: Tensor | None, count: int) -> AttentionMask:
    """What is seen of keys of which `count` are left out, none of them hidden in a row by its length."""
    return FULL if lengths is None else AttentionMask(key_lengths=lengths - count)


def _volume(box: Box) -> int:
    t, y, x = (each.stop - each.start for each in box)
    return t * y * x
