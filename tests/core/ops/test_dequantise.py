import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from calotype.core.ops.dequantise import BLOCK_FORMATS, BlockFormat, dequantise, dequantise_into

HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where each format keeps float16 numbers."""


def random_rows(blocks: BlockFormat, rows: int, blocks_per_row: int) -> torch.Tensor:
    """Random bytes, but for float16 numbers, which are finite."""
    generator = torch.Generator().manual_seed(blocks.bytes)
    packed = torch.randint(0, 256, (rows, blocks_per_row, blocks.bytes), dtype=torch.uint8, generator=generator)
    for place in HALVES[blocks.name]:
        packed[..., place + 1] &= 0xBF
    return packed.view(rows, -1)


def expected(blocks: BlockFormat, packed: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(packed.numpy(), GGMLQuantizationType[blocks.name]).astype(np.float32))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_values_are_bit_equal_to_those_of_the_gguf_package(name: str) -> None:
    blocks = BLOCK_FORMATS[name]
    assert (blocks.elements, blocks.bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    packed = random_rows(blocks, 70, 3)
    values = dequantise(blocks, packed)
    assert values.shape == (70, 3 * blocks.elements) and values.std() > 0
    assert torch.equal(values, expected(blocks, packed))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_long_rows_other_dtypes_and_rows_out_of_order(name: str) -> None:
    blocks = BLOCK_FORMATS[name]
    packed = random_rows(blocks, 6, 40_000 // blocks.elements)  # several chunks
    reordered = packed.unflatten(0, (3, 2)).transpose(0, 1)
    values = torch.empty(2, 3, packed.shape[1] // blocks.bytes * blocks.elements, dtype=torch.bfloat16)
    dequantise_into(blocks, reordered, values)
    assert torch.equal(values, dequantise(blocks, packed)[[0, 2, 4, 1, 3, 5]].view_as(values).bfloat16())


def test_widths() -> None:
    assert BLOCK_FORMATS["Q6_K"].packed_width(512) == 420
    with pytest.raises(ValueError, match="a row of 48 values is not whole Q4_0 blocks of 32"):
        BLOCK_FORMATS["Q4_0"].packed_width(48)
