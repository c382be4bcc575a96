"""Weights that are stored as float8 with one factor for the whole tensor beside them, as ComfyUI and others write them.

A weight's values are those of `x.weight` times the number in `x.scale_weight` (or `x.weight_scale`). Scales of inputs
and marks are for float8 arithmetic, which is not done here.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch

from .stored_tensor import StoredTensor

FACTORS = (".scale_weight", ".weight_scale")
"""How the keys of factors end."""
_UNUSED = (".scale_input", ".input_scale", ".comfy_quant")
_MARK = "scaled_fp8"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def with_factors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with each weight's factor at the weight instead of under a name of its own.

    Raises:
        ValueError: a factor of a weight that is not float8, or more than one number for a weight.
    """
    factors = {_weight(name): each for name, each in tensors.items() if name.endswith(FACTORS)}
    factors = {name: each for name, each in factors.items() if name in tensors}
    if not factors:
        return dict(tensors)
    for name, factor in factors.items():
        _check(tensors[name], factor)
    gone = {factor.name for factor in factors.values()}
    return {
        name: replace(each, factor=factors[name]) if name in factors else each
        for name, each in tensors.items()
        if name not in gone and not name.endswith(_UNUSED) and name.rpartition(".")[2] != _MARK
    }


def _weight(name: str) -> str:
    """The weight that a factor belongs to."""
    return name.rpartition(".")[0] + ".weight"


def _check(weight: StoredTensor, factor: StoredTensor) -> None:
    if weight.dtype not in _FLOAT8:
        kind = str(weight.dtype).removeprefix("torch.")
        raise ValueError(
            f"{weight.file}: {weight.name!r} is stored as {kind} with a factor {factor.name!r}; of scaled weights only "
            "float8 ones can be read (not int8, NVFP4 or MXFP8)"
        )
    if prod(factor.shape) != 1 or not factor.dtype.is_floating_point:
        raise ValueError(
            f"{weight.file}: the factor {factor.name!r} has the shape {list(factor.shape)}; only float8 weights with "
            "one factor for the whole tensor can be read"
        )
