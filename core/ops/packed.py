"""Linear layers whose weights stay packed: 8 bits with a scale per output, or 4 bits with one per group of 32 inputs.

Decoding one token reads every weight once, so fewer bytes are more tokens. The kernels are torch's own for CPUs, with
bfloat16 activations: on one core with AVX2 and one row they take 5 to 11 (int8) and 5 to 6 (int4) thousand million
weights a second, but 0.7 and 0.4 with float32 ones; matrices in float32 take 2 to 8, least those beyond the caches.
Where a kernel refuses, the weight is unpacked for each call (the plain reference).

Legend: N outputs, K inputs, G groups (K / 32).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from .quantise import GROUP, Quantised, quantise_int4, quantise_int8, values_int4, values_int8

Kind = Literal["int8", "int4"]

_FEW_ROWS = 32  # up to here the int8 kernel beats unpacking and a plain product


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """What became of one weight: its kind, ||W - W'|| / ||W||, its size, and whether torch's kernel runs it."""

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
    """x W^T + b with a packed W [N, K]; activations are rounded to bfloat16 where a kernel runs.

    Raises:
        ValueError: an unknown kind.
    """

    packed: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: Kind) -> None:
        super().__init__()
        check_kind(kind)
        self.kind: Kind = "int8" if weight.shape[1] % GROUP else kind
        self.out_features, self.in_features = weight.shape
        quantise = quantise_int8 if self.kind == "int8" else quantise_int4
        quantised = quantise(weight.detach())
        self.error = quantised.error
        packed = _kernel_layout(self.kind, quantised)
        self.has_kernel = packed is not None
        self.register_buffer("packed", _plain_layout(self.kind, quantised.numbers) if packed is None else packed)
        self.register_buffer("scales", quantised.scales)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N], in x's dtype."""
        rows = x.reshape(-1, self.in_features)
        is_worth_it = self.kind == "int4" or len(rows) <= _FEW_ROWS
        if self.has_kernel and is_worth_it and rows.device.type == "cpu":
            rows = rows.to(self.scales.dtype).contiguous()  # as the kernels want it
            y = _product(self.kind, rows, self.packed, self.scales).to(x.dtype)
        else:
            y = functional.linear(rows, self.unpacked(x.dtype))
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def unpacked(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that the layer multiplies by."""
        if self.kind == "int8":
            return values_int8(self.packed, self.scales, dtype)
        if self.has_kernel:  # its layout is the kernel's own: ask for the product with each unit vector
            units = torch.eye(self.in_features, dtype=self.scales.dtype)
            return _product(self.kind, units, self.packed, self.scales).T.to(dtype)
        numbers = torch.stack((self.packed & 15, self.packed >> 4), dim=-1).flatten(1)
        return values_int4(numbers, self.scales, dtype)

    def report(self, name: str, bytes_before: int) -> PackedWeight:
        """What became of the weight."""
        return PackedWeight(
            name=name,
            kind=self.kind,
            error=self.error,
            bytes_before=bytes_before,
            bytes_after=self.packed.nbytes + self.scales.nbytes,
            has_kernel=self.has_kernel,
        )

    def extra_repr(self) -> str:
        """Sizes and kind, for `print`."""
        return f"{self.in_features}, {self.out_features}, {self.kind}, has_kernel={self.has_kernel}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Other devices as for any module; scales keep the dtype that the kernel needs."""
        place = fn(torch.empty(0)).device
        if place.type != "cpu" and self.has_kernel and self.kind == "int4":
            raise ValueError(f"4-bit weights packed for the CPU cannot go to {place}; move the model, then pack it")
        self.packed, self.scales = self.packed.to(place), self.scales.to(place)
        self.bias = None if self.bias is None else fn(self.bias)
        return self

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        raise ValueError(f"{prefix.rstrip('.')} is packed and cannot be saved; save the model before packing it")


def _kernel_layout(kind: Kind, quantised: Quantised) -> Tensor | None:
    """The numbers as the kernel wants them, or None if it refuses this weight."""
    numbers = quantised.numbers
    if numbers.device.type != "cpu":
        return None
    try:
        packed = numbers if kind == "int8" else torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1)
        _product(kind, torch.zeros(1, numbers.shape[1], dtype=quantised.scales.dtype), packed, quantised.scales)
    except (RuntimeError, NotImplementedError, AttributeError):  # by shape, by processor, or not in this torch
        return None
    return packed


def _plain_layout(kind: Kind, numbers: Tensor) -> Tensor:
    """int8 as it is; two neighbouring 4-bit numbers in a byte, the first one low."""
    return numbers if kind == "int8" else numbers[:, ::2] | (numbers[:, 1::2] << 4)


def _product(kind: Kind, rows: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """torch's kernel: rows [M, K] of the scales' dtype to [M, N]."""
    if kind == "int8":
        return torch.ops.aten._weight_int8pack_mm(rows, packed, scales)
    return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, GROUP, scales)
