"""GGUF files of denoisers, as city96 writes them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def write_gguf(path: Path, weights: Mapping[str, Tensor], *, reshaped: bool = False) -> dict[str, Tensor]:
    """Tensors in Q8_0, but for vectors and those whose rows are no whole blocks; the values that were written. Those
    may be `reshaped` to rows of 256 first."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    code, read, writer = GGMLQuantizationType.Q8_0, dict(weights), GGUFWriter(path, "test")
    for name, x in weights.items():
        array = x.numpy()
        if reshaped and x.ndim > 1 and x.numel() % 256 == 0 and x.shape[-1] % 256:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(x.shape))
            array = array.reshape(-1, 256)
        if x.ndim > 1 and array.shape[-1] % 32 == 0:
            packed = quants.quantize(array, code)
            read[name] = torch.from_numpy(quants.dequantize(packed, code)).view(x.shape)
            writer.add_tensor(name, packed, raw_dtype=code)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read
