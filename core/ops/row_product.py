"""A linear layer that is fast on a CPU, for few rows, as in decoding token by token, and for long inputs.

Few rows go to our own kernel (`kernels`), which reads the matrix once for four of them, as fast as memory gives it.
Without it: torch hands the product of one row with a matrix to one thread, which cannot draw the memory's whole
bandwidth; as a batch of products, each with some of the matrix's rows, it is shared among the threads. For a few rows,
W X^T runs at two to three times the rate of X W^T.

For many rows, oneDNN's kernels take up to a fifth less time than those of MKL that torch calls, but add up all K terms
in one chain: about twice the error for 576, and more for more. So they get long inputs only, where time matters most,
and short chains. Processors without products in bfloat16 (AVX-512 BF16, AMX) multiply many rows in float32, four times
faster than by torch's substitute; the rows may be float32 already, with weights in bfloat16 (`working_dtype`). What is
computed is the same but for rounding.

Legend: N outputs, K inputs, T threads.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from .kernels import KINDS, MOST_ROWS, alone, few_rows, may_run

_FEW_ROWS = 16
_SMALLEST = 2**18  # weights; below, starting threads costs more than it saves
_PIECE = 2**22  # weights that are float32 at a time; products with fewer are slower
_LONG = 256  # tokens, whatever the number of batch rows: a row alone goes the way that it goes in a batch
_LONGEST_CHAIN = 1024
_HAS_ONEDNN = torch.backends.mkldnn.is_available()
_HAS_BFLOAT16 = _HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Linear(nn.Linear):
    """`nn.Linear`, made for few rows and for many."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        return linear(input, self.weight, self.bias)


class WideLinear(nn.Linear):
    """`nn.Linear`, made for many rows in any dtype: those of denoisers, whose float32 products stay torch's own."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        return wide_linear(input, self.weight, self.bias)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b for many rows, in x's dtype: that of `functional.linear`, or of weights in bfloat16 through float32,
    where x is float32 or that is faster."""
    if _goes_by_float32(x, weight):
        return _by_float32(x, weight, bias)
    return functional.linear(x, weight, bias)


def add_wide_product(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """y + x W^T for many rows, `wide_linear`'s dtypes, in the memory of a contiguous y."""
    if _goes_by_float32(x, weight):
        rows, out = _rows(x), y.flatten(0, -2)
        for part in _parts(weight):
            if y.dtype is torch.float32:
                out[:, part].addmm_(rows, weight[part].float().T)
            else:
                out[:, part] += functional.linear(rows, weight[part].float())
        return y
    y.flatten(0, -2).addmm_(x.flatten(0, -2), weight.T)
    return y


def working_dtype(x: Tensor) -> torch.dtype:
    """What to keep activations like x in: float32 instead of bfloat16 on a CPU without products in bfloat16, where no
    gradient follows; else x's dtype."""
    is_slow = x.is_cpu and x.dtype is torch.bfloat16 and not _HAS_BFLOAT16
    return torch.float32 if is_slow and not torch.is_grad_enabled() else x.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b for x [..., K] and W [N, K], as `functional.linear`."""
    size, width = weight.shape
    rows = x.numel() // max(1, width)
    if 0 < rows <= MOST_ROWS and _suits_kernel(x, weight):
        y = few_rows(KINDS[weight.dtype], x, weight, None, size)
        y = y if bias is None else y.add_(bias)
        return y if x.dtype is torch.float32 else y.to(x.dtype)
    if _goes_by_float32(x, weight):
        return _by_float32(x, weight, bias)
    if not _pays(x, weight):
        return functional.linear(x, weight, bias)
    if rows > _FEW_ROWS:
        if _HAS_ONEDNN and width <= _LONGEST_CHAIN and x.dim() > 1 and x.shape[-2] >= _LONG:
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return functional.linear(x, weight, bias)
    y = _one_row(x, weight) if rows == 1 else torch.mm(weight, x.reshape(rows, width).T).T.contiguous()
    y = y.view(*x.shape[:-1], size)
    return y if bias is None else y + bias


def _one_row(x: Tensor, weight: Tensor) -> Tensor:
    """The product with one row, the rows of W in T equal parts where they can be."""
    (size, width), parts = weight.shape, torch.get_num_threads()
    if size % parts:
        parts = 1
    height = size // parts
    row = x.as_strided((parts, 1, width), (0, 0, x.stride(-1)))  # the same one for each part
    return torch.bmm(row, weight.as_strided((parts, width, height), (height * width, 1, width)))


def _suits_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether our kernel takes them."""
    if x.dtype not in (weight.dtype, torch.float32) or weight.dtype not in KINDS or x.shape[-1] != weight.shape[1]:
        return False
    return weight.is_contiguous() and may_run(x, weight)


def _goes_by_float32(x: Tensor, weight: Tensor) -> bool:
    """Whether weights in bfloat16 meet float32 rows, or are many and meet rows for which torch has no kernel."""
    if not x.is_cpu or weight.dtype is not torch.bfloat16:
        return False
    if x.dtype is torch.float32:
        return True
    pays = weight.numel() >= _SMALLEST and not torch.is_grad_enabled()
    return pays and x.dtype is torch.bfloat16 and not _HAS_BFLOAT16


def _by_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A few outputs at a time, so that few weights are float32 at once."""
    rows, size = _rows(x), len(weight)
    if x.dtype is not torch.float32 or not alone():
        parts = [
            functional.linear(rows, weight[part].float(), None if bias is None else bias[part].float()).to(x.dtype)
            for part in _parts(weight)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).view(*x.shape[:-1], size)
    y = x.new_empty(len(rows), size)
    for part in _parts(weight):
        if bias is None:
            torch.mm(rows, weight[part].float().T, out=y[:, part])
        else:
            torch.addmm(bias[part].float(), rows, weight[part].float().T, out=y[:, part])
    return y.view(*x.shape[:-1], size)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).float()


def _parts(weight: Tensor) -> Iterator[slice]:
    """Of a matrix's outputs, a few at a time."""
    size, width = weight.shape
    count = max(1, _PIECE // max(1, width))
    return (slice(start, min(start + count, size)) for start in range(0, size, count))


def _pays(x: Tensor, weight: Tensor) -> bool:
    if not x.is_cpu or weight.dtype is not torch.float32 or x.dtype is not torch.float32:
        return False
    return weight.numel() >= _SMALLEST and weight.is_contiguous() and not torch.is_grad_enabled()
