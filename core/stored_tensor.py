"""One tensor of a weights file, described before it is read."""

from dataclasses import dataclass
from pathlib import Path

import torch

from .ops.dequantise import BlockFormat
from .row_operations import Shape


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Its storage format, shape, and place in bytes: after the header in safetensors, from the file's begin in GGUF.

    `blocks` is the format of quantised values; `dtype` is then float32, what they stand for. `factor` is a tensor of
    one number that all values are multiplied by.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: Shape
    start: int
    stop: int
    blocks: BlockFormat | None = None
    factor: "StoredTensor | None" = None

    @property
    def has_whole_rows(self) -> bool:
        """Whether each row is stored alone: blocks of quantised values may run on from one row into the next."""
        return self.blocks is None or self.shape[-1] % self.blocks.elements == 0
