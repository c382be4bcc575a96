"""Linear layers whose weights stay packed: 8 bits with a scale per output, or 4 bits with one per group of 32 inputs.

Decoding one token reads every weight once, so fewer bytes are more tokens, as far as a kernel can make numbers of them
as fast as they are read. On two cores with AVX2, one row, in thousand million weights a second: our kernel 23 of "int8"
and 18 of "int4" (activations stay float32), torch's "int4" 9 (bfloat16 activations), matrices in float32 8. "w8a8"
rounds activations to 8 bits as well and so multiplies whole numbers: for many rows, at a larger error.

Legend: N outputs, K inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from .packed_matrix import Kind, packed_matrix
from .quantise import GROUP, Quantised, quantise_int4, quantise_int8, quantise_w8a8

_QUANTISE: Mapping[Kind, Callable[[Tensor], Quantised]] = {
    "int8": quantise_int8,
    "int4": quantise_int4,
    "w8a8": quantise_w8a8,
}


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """What became of one weight: its kind, ||W - W'|| / ||W||, its size, and whether a kernel runs it."""

    name: str
    kind: Kind
    error: float
    bytes_before: int
    bytes_after: int
    has_kernel: bool


@dataclass(frozen=True, kw_only=True)
class PackingReport:
    """The error and size of every weight that was packed."""

    weights: tuple[PackedWeight, ...]

    @property
    def mean_error(self) -> float:
        """The mean of the weights' relative errors."""
        return sum(weight.error for weight in self.weights) / max(1, len(self.weights))

    @property
    def worst(self) -> PackedWeight | None:
        """The weight with the largest relative error."""
        return max(self.weights, key=lambda weight: weight.error, default=None)

    @property
    def bytes_before(self) -> int:
        """Bytes of the weights before."""
        return sum(weight.bytes_before for weight in self.weights)

    @property
    def bytes_after(self) -> int:
        """Bytes of the weights packed."""
        return sum(weight.bytes_after for weight in self.weights)

    def __str__(self) -> str:
        if self.worst is None:
            return "nothing was packed"
        return (
            f"{len(self.weights)} weights packed, {self.bytes_before / 2**20:.1f} to {self.bytes_after / 2**20:.1f} "
            f"MiB; relative error {self.mean_error:.2g} on average, {self.worst.error:.2g} at worst "
            f"({self.worst.name}, {self.worst.kind})"
        )


def pack_linears(module: nn.Module, kind: Kind, *, skip: Callable[[str], bool] | None = None) -> PackingReport:
    """Replace the `nn.Linear` layers below a module by packed ones, but for those whose name `skip` accepts.

    A layer that 4 bits do not fit (its inputs are not a multiple of 32) gets 8. Packed models are for inference: they
    have no gradients and cannot be saved.

    Raises:
        ValueError: an unknown kind, a module that is itself a linear layer, or a weight without values (meta device).
    """
    check_kind(kind)
    if isinstance(module, nn.Linear):
        raise ValueError("pack_linears replaces the layers below a module; use PackedLinear for a single one")
    chosen = [
        (name, each)
        for name, each in module.named_modules(remove_duplicate=False)
        if isinstance(each, nn.Linear) and not (skip is not None and skip(name))
    ]
    for name, linear in chosen:
        if linear.weight.is_meta:
            raise ValueError(f"cannot pack {name}: it is on the meta device and has no value")
    packed: dict[int, PackedLinear] = {}
    reports: list[PackedWeight] = []
    for name, linear in chosen:
        if id(linear) not in packed:
            packed[id(linear)] = PackedLinear(linear.weight, linear.bias, kind)
            reports.append(packed[id(linear)].report(name, linear.weight.nbytes))
        module.set_submodule(name, packed[id(linear)])
    return PackingReport(weights=tuple(reports))


def check_kind(kind: str) -> None:
    """Raises ValueError if there is no such kind."""
    if kind not in get_args(Kind):
        raise ValueError(f"weights cannot be packed as {kind!r}; known are {', '.join(get_args(Kind))}")


class PackedLinear(nn.Module):
    """x W^T + b with a packed W [N, K]. Where one of torch's kernels runs, activations are rounded too: to bfloat16, or
    ("w8a8") to 8 bits with a scale for each row.

    Raises:
        ValueError: an unknown kind.
    """

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: Kind) -> None:
        super().__init__()
        check_kind(kind)
        self.kind: Kind = "int8" if kind == "int4" and weight.shape[1] % GROUP else kind
        self.out_features, self.in_features = weight.shape
        quantised = _QUANTISE[self.kind](weight.detach())
        self.error = quantised.error
        self.matrix = packed_matrix(self.kind, quantised)
        self.register_buffer("bias", None if bias is None else bias.detach())

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel runs this weight."""
        return self.matrix.has_kernel

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N], in x's dtype."""
        y, bias = self.matrix.product(x), self.bias
        return y if bias is None else y + bias

    def unpacked(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that the layer multiplies by."""
        return self.matrix.unpacked(dtype)

    def report(self, name: str, bytes_before: int) -> PackedWeight:
        """What became of the weight."""
        return PackedWeight(
            name=name,
            kind=self.kind,
            error=self.error,
            bytes_before=bytes_before,
            bytes_after=self.matrix.bytes,
            has_kernel=self.has_kernel,
        )

    def extra_repr(self) -> str:
        """Sizes and kind, for `print`."""
        return f"{self.in_features}, {self.out_features}, {self.kind}, has_kernel={self.has_kernel}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Other devices as for any module; scales keep the dtype that the kernel needs."""
        self.matrix = self.matrix.on(fn(torch.empty(0)).device)
        self.bias = None if self.bias is None else fn(self.bias)
        return self

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        raise ValueError(f"{prefix.rstrip('.')} is packed and cannot be saved; save the model before packing it")
