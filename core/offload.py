"""Weights that stay in their files until they are used, and go again after: a module on the meta device, and what reads
them.

Nothing shared changes: each use has its own copy of the module, so threads stay safe. The pages of a mapped file that
the system keeps in memory are the copy on the host.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from .checkpoint import Files
from .key_map import KeyMap, named_weights
from .loading import fill_module, load_weights
from .stream import Block, BlockInputs, Cache, Runner, Stream, run_blocks
from .weight_source import WeightSource

M = TypeVar("M", bound=nn.Module)
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredWeights:
    """The weights of one module that is on the meta device: read from `source`, to `device`, for each use."""

    source: WeightSource
    device: torch.device = CPU

    def resident(self, module: M) -> M:
        """A copy of the module that has them."""
        return resident(module, self.source, device=self.device)

    def moved(self, device: torch.device, dtype: torch.dtype | None) -> "StoredWeights":
        """The same, read to another device; the dtype is the module's."""
        return replace(self, device=device)


def filled(
    module: nn.Module,
    files: Files,
    key_map: KeyMap,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = CPU,
) -> StoredWeights | None:
    """`load_weights` into a module on the meta device; or, where `device` is the meta device as well, all its checks
    alone, and where the weights lie. Errors as there."""
    if torch.device(device).type != "meta":
        load_weights(module, files, key_map, dtype=dtype, device=device)
        return None
    source = WeightSource.for_module(module, files, key_map)
    fill_module(module, source, dtype=dtype, hoisted=lambda name: True)
    return StoredWeights(source=source)


def resident(module: M, source: WeightSource, *, device: torch.device, prefix: str = "") -> M:
    """A copy of a module in which weights that are on the meta device have the values of `source`, where their names
    begin with `prefix`; it shares the others. Buffers that no file holds go to `device` too."""
    memo: dict[int, object] = {id(parameter): parameter for parameter in module.parameters()}
    memo |= {id(buffer): buffer if buffer.is_meta else buffer.to(device) for buffer in module.buffers()}
    for name, weight in named_weights(module).items():
        if weight.is_meta:
            value = source.read(prefix + name, dtype=weight.dtype, device=device)
            is_parameter = isinstance(weight, nn.Parameter)
            memo[id(weight)] = nn.Parameter(value, requires_grad=False) if is_parameter else value
    return copy.deepcopy(module, memo)


@dataclass(frozen=True, kw_only=True)
class StoredBlocks:
    """A runner around `then` for blocks on the meta device, whose weights are in `source` under names that begin as
    `names` says: each is read when its turn comes, and let go after it. Others are left to `then` as they are.

    One block's weights are in memory for each run, and results are bit-equal.
    """

    source: WeightSource
    names: Mapping[Block, str]
    then: Runner = run_blocks

    def __call__(self, blocks: Sequence[Block], stream: Stream, prepared: BlockInputs, cache: Cache) -> Stream:
        """The stream after all blocks."""
        return self.then([self._stored(block) for block in blocks], stream, prepared, cache)

    def _stored(self, block: Block) -> Block:
        if block not in self.names or not isinstance(block, nn.Module):
            return block
        return _StoredBlock(block=block, source=self.source, prefix=f"{self.names[block]}.")


@dataclass(frozen=True, kw_only=True)
class _StoredBlock:
    """A block that has its weights while it computes."""

    block: nn.Module
    source: WeightSource
    prefix: str

    def __call__(self, stream: Stream, prepared: BlockInputs, cache: Cache, i: int) -> Stream:
        """The stream after the block."""
        block = resident(self.block, self.source, device=stream.x.device, prefix=self.prefix)
        return block(stream, prepared, cache, i)
