"""Modulations whose linear layers only `prepare` uses, so that their weights may stay in the checkpoint's files.

Legend: E evaluations, B rows, D width.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.loading import fill_module
from ..core.modulation import ShiftScale, ShiftScaleGate
from ..core.offload import StoredBlocks
from ..core.saving import Weight, weights_of
from ..core.stream import Block, Runner
from ..core.weight_source import WeightSource


class HoistingModule(nn.Module):
    """A network whose weights with names that begin with one of `hoisted` are used by `prepare` alone.

    Those that are on the meta device are read from `source` by each `prepare`; made in memory, they stay there.
    `walked` are the lists of blocks that runners walk: their weights may be on the meta device too, and are then read
    for each turn of a block.
    """

    hoisted: ClassVar[tuple[str, ...]] = ()
    walked: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.source: WeightSource | None = None

    def fill(
        self,
        source: WeightSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
        block_device: torch.device | None = None,
    ) -> None:
        """Gives the network, on the meta device, its weights from `source`; the hoisted ones stay there, and those of
        the blocks where `block_device` is the meta device."""
        stays = block_device is not None and block_device.type == "meta"
        walked = tuple(f"{name}." for name in self.walked) if stays else ()
        absent = (*self.hoisted, *walked)
        fill_module(self, source, dtype=dtype, device=device, hoisted=lambda name: name.startswith(absent))
        self.requires_grad_(False).eval()
        self.source = source

    def runner(self, then: Runner) -> Runner:
        """`then`, with blocks read from their files where they are not in memory."""
        names: dict[Block, str] = {}
        for name in self.walked:
            for place, block in self.get_submodule(name).named_children():
                if any(parameter.is_meta for parameter in block.parameters()):
                    names[block] = f"{name}.{place}"
        return then if self.source is None or not names else StoredBlocks(source=self.source, names=names, then=then)

    def weights(self) -> dict[str, Weight]:
        """All weights by our names, to be saved; those that are not in memory are read from their source."""
        return weights_of(self, self.source)

    def projected(self, name: str, h: Tensor) -> Tensor:
        """The linear layer `name` of h; where it is on the meta device its weights are read for this.

        Raises:
            ValueError: there is nothing to read them from.
        """
        return self.projections(name, (h,))[0]

    def projections(self, name: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The same of several inputs, for which weights are read once."""
        linear = self.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        if not linear.weight.is_meta:
            return [linear(h) for h in inputs]
        names = [f"{name}.{leaf}" for leaf, _ in linear.named_parameters()]  # the weight, and the bias if there is one
        source, like = self.source_of(name), inputs[0]
        weights = [source.read(each, dtype=like.dtype, device=like.device) for each in names]
        return [functional.linear(h, *weights) for h in inputs]

    def value(self, name: str, like: Tensor) -> Tensor:
        """The parameter `name`, in the dtype and on the device of `like`; where it is on the meta device it is read for
        this, in the file's precision.

        Raises:
            ValueError: there is nothing to read it from.
        """
        parameter = self.get_parameter(name)
        if parameter.is_meta:
            return self.source_of(name).read(name, dtype=like.dtype, device=like.device)
        return parameter.to(like)

    def source_of(self, name: str) -> WeightSource:
        """Where the weights of `name`, which is on the meta device, are read from. ValueError where there is nothing to
        read them from."""
        if self.source is None:
            raise ValueError(f"{name} has no weights, and the denoiser no source to read them from")
        return self.source


def gated(table: Tensor, count: int) -> list[list[ShiftScaleGate]]:
    """Per evaluation, the `count` modulations in a table [E, B, 3 D count]; tensors [B, 1, D]."""
    parts = table[:, :, None].chunk(3 * count, dim=-1)
    return [
        [
            ShiftScaleGate(shift=parts[3 * n][e], scale=parts[3 * n + 1][e], gate=parts[3 * n + 2][e])
            for n in range(count)
        ]
        for e in range(len(table))
    ]


def ungated(table: Tensor) -> list[ShiftScale]:
    """By evaluation, the modulation in a table [E, B, 2 D]; tensors [B, 1, D]."""
    shift, scale = table[:, :, None].chunk(2, dim=-1)
    return [ShiftScale(shift=a, scale=b) for a, b in zip(shift, scale, strict=True)]
