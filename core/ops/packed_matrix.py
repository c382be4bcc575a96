"""How a matrix of few bits lies in memory, and how it is multiplied by.

Few rows go to our own kernel (`kernels`) where there is one; the others are torch's for CPUs, each with a layout of
its own. Where all refuse a matrix (by its shape, the processor, or how torch was built), and in some for many rows, the
matrix is unpacked for each product: the plain reference.

Legend: M rows, N outputs, K inputs, G groups (K / 32).
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn import functional

from .kernels import IS_BUILT, few_rows, may_run_untracked, unpacked
from .quantise import GROUP, Quantised, values_int4, values_int8

Kind = Literal["int8", "int4", "w8a8"]

_FEW_ROWS = 32  # up to here kernels beat unpacking and a plain product
_LARGEST = 127  # of an activation in 8 bits
_MIDDLE = 128  # what stands for 0 in them
_SCALE_BYTES = 8  # of an output, as FBGEMM keeps it: the scale, and the sum of its weights


class PackedMatrix(ABC):
    """W [N, K] in few bits. It never changes, so a copy is the matrix itself."""

    has_kernel = True
    bytes: int

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """x W^T: [..., K] to [..., N], in x's dtype."""

    @abstractmethod
    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """W [N, K]."""

    def on(self, device: torch.device) -> "PackedMatrix":
        """The matrix on another device.

        Raises:
            ValueError: its layout is that of a CPU's kernel.
        """
        if device.type != "cpu":
            raise ValueError(f"weights packed for the CPU cannot go to {device}; move the model, then pack it")
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self


class Unpacking(PackedMatrix):
    """The plain reference: int8 as it is with a scale per output [N], or 4-bit numbers in uint8 [N, G, 16], of which
    byte j of a group holds number j low and number j + 16 high, with scales [N, G, 2] (see `quantise_int4`)."""

    has_kernel = False

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        self.numbers, self.scales = numbers, scales
        self.bytes = numbers.nbytes + scales.nbytes

    @classmethod
    def of(cls, quantised: Quantised) -> Self:
        """Of whole numbers, one each."""
        numbers, scales = quantised.numbers, quantised.scales
        if numbers.dtype is torch.int8:
            return cls(numbers, scales)
        low, high = numbers.unflatten(1, (-1, GROUP)).chunk(2, dim=-1)
        return cls(low | (high << 4), scales.transpose(0, 1).contiguous())

    def product(self, x: Tensor) -> Tensor:
        """In x's dtype throughout."""
        return functional.linear(x, self.unpacked(x.dtype))

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """[N, K]."""
        if self.numbers.dtype is torch.int8:
            return values_int8(self.numbers, self.scales, dtype)
        numbers = torch.cat((self.numbers & 15, self.numbers >> 4), dim=-1).flatten(1)
        return values_int4(numbers, self.scales.transpose(0, 1), dtype)

    def on(self, device: torch.device) -> "PackedMatrix":
        """The matrix on another device."""
        return Unpacking(self.numbers.to(device), self.scales.to(device))


class OfFewRows(Unpacking):
    """The plain layout, in which a kernel takes few rows; many are a plain product with the unpacked matrix, as all are
    on other devices."""

    has_kernel = True

    def on(self, device: torch.device) -> PackedMatrix:
        """The matrix on another device."""
        return self if device.type == "cpu" else super().on(device)

    def product(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N], in x's dtype."""
        if not 0 < x.numel() <= _FEW_ROWS * x.shape[-1] or not self.takes(x):
            return super().product(x)
        y = self.of_few(x)
        return y if y.dtype is x.dtype else y.to(x.dtype)

    def takes(self, x: Tensor) -> bool:
        """Whether the kernel takes rows like these."""
        return True

    @abstractmethod
    def of_few(self, x: Tensor) -> Tensor:
        """x W^T, in the kernel's dtype."""


class OurKernel(OfFewRows):
    """8 or 4 bits with bfloat16 scales; activations and sums stay float32.

    Raises:
        NotImplementedError: the kernel was not built, or the processor lacks what it needs.
    """

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        if not IS_BUILT:
            raise NotImplementedError("our kernel for few rows was not built")
        super().__init__(numbers.contiguous(), scales)
        is_int8 = numbers.dtype is torch.int8
        self.kind: Literal["int8", "int4"] = "int8" if is_int8 else "int4"
        self.size = len(numbers)
        self.width = numbers.shape[1] if is_int8 else numbers.shape[1] * GROUP

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """[N, K]."""
        if dtype is not torch.float32 or not self.numbers.is_cpu:
            return super().unpacked(dtype)
        return unpacked(self.kind, self.numbers, self.scales, self.width)

    def takes(self, x: Tensor) -> bool:
        """Gradients with respect to x are torch's."""
        return x.shape[-1] == self.width and may_run_untracked(x)

    def of_few(self, x: Tensor) -> Tensor:
        """In float32."""
        return few_rows(self.kind, x, self.numbers, self.scales, self.size)


class Int8Kernel(OfFewRows):
    """8 bits with a bfloat16 scale per output; torch's kernel takes bfloat16 rows."""

    def of_few(self, x: Tensor) -> Tensor:
        """In bfloat16."""
        rows = x.reshape(-1, x.shape[-1]).to(self.scales.dtype).contiguous()
        y = torch.ops.aten._weight_int8pack_mm.default(rows, self.numbers, self.scales)
        return y.view(*x.shape[:-1], y.shape[1])


class Int4Kernel(PackedMatrix):
    """4 bits with bfloat16 scales per group of 32 inputs; the kernel takes bfloat16 rows."""

    def __init__(self, quantised: Quantised) -> None:
        self.width, self.scales = quantised.numbers.shape[1], quantised.scales
        self.numbers = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(quantised.numbers.int(), 1)
        self.bytes = self.numbers.nbytes + self.scales.nbytes

    def product(self, x: Tensor) -> Tensor:
        """In bfloat16."""
        rows = x.reshape(-1, self.width).to(self.scales.dtype).contiguous()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu.default(rows, self.numbers, GROUP, self.scales)
        return y.to(x.dtype).view(*x.shape[:-1], y.shape[1])

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """By the product with each unit vector: the layout is the kernel's own."""
        return self.product(torch.eye(self.width, dtype=self.scales.dtype)).T.to(dtype)


class W8A8Kernel(PackedMatrix):
    """8 bits with a scale per output, times rows that are rounded to 8 bits with a scale per row: FBGEMM's product of
    whole numbers. It is exact beside that rounding, so a row's result does not depend on those beside it.
    """

    def __init__(self, quantised: Quantised) -> None:
        size, self.width = quantised.numbers.shape
        zeros = torch.zeros(size, dtype=torch.int64)
        with warnings.catch_warnings(action="ignore"):  # torch means to have another type for this one day
            make = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            numbers = make(quantised.numbers, quantised.scales.double(), zeros, 0)
            self._packed = torch.ops.quantized.linear_prepack(numbers, None)
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        self.bytes = quantised.numbers.nbytes + size * _SCALE_BYTES

    def product(self, x: Tensor) -> Tensor:
        """In float32 but for the product itself. A row of zeros has no scale: whatever 0 / 0 is rounded to, times 0."""
        if x.dtype is not torch.float32:
            return self.product(x.float()).to(x.dtype)
        rows = x.reshape(-1, self.width)
        largest = torch.linalg.vector_norm(rows, torch.inf, dim=-1, keepdim=True)
        y = self._multiply(rows / largest, 1 / _LARGEST, _MIDDLE, self._packed).mul_(largest)
        return y.view(*x.shape[:-1], y.shape[1])

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """By the product with each unit vector: the layout is the kernel's own."""
        return self.product(torch.eye(self.width)).T.to(dtype)


_KERNELS: dict[Kind, tuple[Callable[[Quantised], PackedMatrix], ...]] = {
    "int8": (OurKernel.of, Int8Kernel.of),
    "int4": (OurKernel.of, Int4Kernel),
    "w8a8": (W8A8Kernel,),
}


def packed_matrix(kind: Kind, quantised: Quantised) -> PackedMatrix:
    """The quantised matrix in the layout of the first kernel that takes it, or in the plain one if all refuse."""
    if quantised.numbers.device.type == "cpu":
        for kernel in _KERNELS[kind]:
            try:
                matrix = kernel(quantised)
                matrix.product(torch.zeros(1, quantised.numbers.shape[1]))
                return matrix
            except (RuntimeError, NotImplementedError, AttributeError):  # by shape, by processor, or not in this torch
                pass
    return Unpacking.of(quantised)
