"""A linear layer that is fast on a CPU, for few rows, as in decoding token by token, and for long inputs.

torch hands the product of one row with a matrix to one thread, which cannot draw the memory's whole bandwidth; as a
batch of products, each with some of the matrix's rows, it is shared among the threads. For a few rows, W X^T runs at
two to three times the rate of X W^T. For many, oneDNN's kernels take a fifth less time than those of MKL that torch
calls, but add up all K terms in one chain: about twice the error for 576, and more for more. So they get long inputs
only, where time matters most, and short chains. What is computed is the same but for rounding.

Legend: N outputs, K inputs, T threads.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

_FEW_ROWS = 16
_SMALLEST = 2**18  # weights; below, starting threads costs more than it saves
_LONG = 256  # tokens, whatever the number of batch rows: a row alone goes the way that it goes in a batch
_LONGEST_CHAIN = 1024
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


class Linear(nn.Linear):
    """`nn.Linear`, made for few rows and for many."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b for x [..., K] and W [N, K], as `functional.linear`."""
    if not _pays(x, weight):
        return functional.linear(x, weight, bias)
    size, width = weight.shape
    rows = x.numel() // width
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


def _pays(x: Tensor, weight: Tensor) -> bool:
    if not x.is_cpu or weight.dtype is not torch.float32 or x.dtype is not torch.float32:
        return False
    return weight.numel() >= _SMALLEST and weight.is_contiguous() and not torch.is_grad_enabled()
