"""The block formats of GGML: quantised values, and the floats they stand for.

Rows are cut into blocks of 32 or 256 values; a block holds its scales and its packed values. All arithmetic is float32
in the order of GGML's own reference (ggml-quants.c, and the `gguf` package), so values are bit-equal to theirs.

Legend: N blocks, R rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

_Unpack: TypeAlias = Callable[[Tensor, Tensor], None]
_CHUNK_VALUES = 1 << 17  # what is unpacked at once stays in a core's cache


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """A block of `elements` values takes `bytes` bytes; `unpack(blocks [N, bytes] uint8, values [N, elements])` writes
    the float32 values.
    """

    name: str
    elements: int
    bytes: int
    unpack: _Unpack

    def packed_width(self, width: int) -> int:
        """The bytes of a row of `width` values. Raises ValueError if these are not whole blocks."""
        if width % self.elements:
            raise ValueError(f"a row of {width} values is not whole {self.name} blocks of {self.elements}")
        return width // self.elements * self.bytes


def dequantise(blocks: BlockFormat, packed: Tensor) -> Tensor:
    """Packed rows [..., bytes] uint8 to float32 [..., values]."""
    width = packed.shape[-1] // blocks.bytes * blocks.elements
    values = torch.empty(*packed.shape[:-1], width, device=packed.device)
    dequantise_into(blocks, packed, values)
    return values


def dequantise_into(blocks: BlockFormat, packed: Tensor, out: Tensor) -> None:
    """Write the values of `packed` (uint8, read in order) to `out` (contiguous, any floating dtype), chunk by chunk.

    Packed rows that do not lie in order are copied, still packed.
    """
    sources, targets = packed.reshape(-1, blocks.bytes), out.view(-1, blocks.elements)
    step = max(1, _CHUNK_VALUES // blocks.elements)
    scratch = None if out.dtype == torch.float32 else torch.empty(step, blocks.elements, device=out.device)
    for start in range(0, len(sources), step):
        target = targets[start : start + step]
        values = target if scratch is None else scratch[: len(target)]
        blocks.unpack(sources[start : start + step], values)
        if scratch is not None:
            target.copy_(values)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 number at byte `start` of each block, [N, 1] float32."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _fields(packed: Tensor, bits: int) -> Tensor:
    """Numbers of `bits` bits in bytes [..., w]: [..., 8 / bits, w] uint8, the lowest bits first."""
    packed = packed.contiguous()
    return torch.stack([(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], dim=-2)


def _nibbles(packed: Tensor, values: Tensor, groups: int) -> None:
    """[N, bytes] to values: in each of `groups` equal runs all low nibbles come first, then the high ones."""
    values.view(len(values), groups, 2, -1).copy_(_fields(packed.unflatten(1, (groups, -1)), 4))


def _fifth_bits(packed: Tensor, values: Tensor) -> None:
    """Add 16 where the bit of a value is set, in [N, 4] bytes, lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    values.view(len(values), 4, 8).add_((packed[..., None] >> shifts) & 1, alpha=16)


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes: [N, 12] to two [N, 8] float32."""
    low, middle, high = packed.unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), dim=1)
    return scales.float(), minima.float()


def _q4_0(blocks: Tensor, values: Tensor) -> None:
    _nibbles(blocks[:, 2:], values, 1)
    values.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, values: Tensor) -> None:
    _nibbles(blocks[:, 4:], values, 1)
    values.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, values: Tensor) -> None:
    _nibbles(blocks[:, 6:], values, 1)
    _fifth_bits(blocks[:, 2:6], values)
    values.sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, values: Tensor) -> None:
    _nibbles(blocks[:, 8:], values, 1)
    _fifth_bits(blocks[:, 4:8], values)
    values.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, values: Tensor) -> None:
    values.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _k_affine(blocks: Tensor, values: Tensor) -> None:
    """Apply the scales and minima of Q4_K and Q5_K to unpacked values."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    runs = values.view(len(values), 8, 32)
    runs.mul_((_half(blocks, 0) * scales)[..., None]).sub_((_half(blocks, 2) * minima)[..., None])


def _q4_k(blocks: Tensor, values: Tensor) -> None:
    _nibbles(blocks[:, 16:], values, 4)
    _k_affine(blocks, values)


def _q5_k(blocks: Tensor, values: Tensor) -> None:
    _nibbles(blocks[:, 48:], values, 4)
    values.view(len(values), 8, 32).add_(_fields(blocks[:, 16:48], 1), alpha=16)
    _k_affine(blocks, values)


def _q6_k(blocks: Tensor, values: Tensor) -> None:
    _nibbles(blocks[:, :128], values, 2)
    high = _fields(blocks[:, 128:192].unflatten(1, (2, 32)), 2)
    values.view(len(values), 2, 4, 32).add_(high, alpha=16).sub_(32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    values.view(len(values), 16, 16).mul_(scales[..., None])


BLOCK_FORMATS: dict[str, BlockFormat] = {
    name: BlockFormat(name=name, elements=elements, bytes=size, unpack=unpack)
    for name, elements, size, unpack in (
        ("Q4_0", 32, 18, _q4_0),
        ("Q4_1", 32, 20, _q4_1),
        ("Q5_0", 32, 22, _q5_0),
        ("Q5_1", 32, 24, _q5_1),
        ("Q8_0", 32, 34, _q8_0),
        ("Q4_K", 256, 144, _q4_k),
        ("Q5_K", 256, 176, _q5_k),
        ("Q6_K", 256, 210, _q6_k),
    )
}
"""The formats that can be read, by GGML's names."""
