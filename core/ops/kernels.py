"""Our kernels in C (`native/`), as functions of tensors: for a CPU, float32, no gradients.

They are there where a compiler built them at installation and the processor has AVX2; callers ask `runs` or `may_run`
first, and have torch's operations for what does not run. Most pay because they are one call: decoding a token is a few
hundred small operations, each of which costs more to call than to carry out.

Legend: N outputs, K inputs, G groups (K / 32), B rows, L tokens, Lk keys, D width, H heads, Hkv key/value heads, Dh
width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from .quantise import GROUP

try:
    from . import _native
except ImportError:  # not built, no AVX2, or torch has another OpenMP than the one that the module was made for
    _native = None

Kind = Literal["float32", "bfloat16", "int8", "int4"]

IS_BUILT = _native is not None
MOST_ROWS = 16  # of a product; beyond, those of whole matrices are faster
KINDS: dict[torch.dtype, Kind] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
KIND_NUMBERS: dict[Kind, int] = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
_SMALLEST = 2**15  # operations of a kernel; below, sharing them among threads costs more than it saves


def runs(*tensors: Tensor) -> bool:
    """Whether the kernels run here and now, and the tensors are float32 and may go to them."""
    return all(x.dtype is torch.float32 for x in tensors) and may_run(*tensors)


def may_run(*tensors: Tensor) -> bool:
    """Whether the kernels run here and now, and the tensors are plain memory of the CPU. They see addresses alone: what
    follows operations (gradients, tangents, tracers, autocast) or stands for tensors must have torch's."""
    return _native is not None and alone() and all(type(x) in (Tensor, Parameter) and x.is_cpu for x in tensors)


def may_run_untracked(*tensors: Tensor) -> bool:
    """`may_run`, but that gradients count only where one of the tensors requires one."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return may_run(*tensors)


def alone() -> bool:
    """Whether nothing follows operations: no gradients, tangents, tracers, compilers, autocast, transforms (vmap)."""
    is_tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_tracing:
        return False
    level = forward_ad._current_level  # pyright: ignore[reportPrivateUsage]
    stack = torch._C._functorch.peek_interpreter_stack()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    return level < 0 and stack is None and not torch.is_autocast_enabled("cpu")


def few_rows(kind: Kind, x: Tensor, weight: Tensor, scales: Tensor | None, size: int) -> Tensor:
    """x W^T in float32 [..., N] for x [..., K] of any dtype and a contiguous W of N outputs.

    W is [N, K] in float32, bfloat16 or int8, or of int4 uint8 [N, G, 16], of which byte j of a group holds number j low
    and number j + 16 high. `scales` are bfloat16: of int8 [N], of int4 [N, G, 2], the step and what number 8 is. A
    row's result is the same whatever rows are beside it.
    """
    assert _native is not None
    width = x.shape[-1]
    assert kind != "int4" or width % GROUP == 0
    inputs = x.float().contiguous()
    rows = inputs.numel() // width
    y = inputs.new_empty(*x.shape[:-1], size)
    scale = 0 if scales is None else scales.data_ptr()
    _native.row_products(
        *(KIND_NUMBERS[kind], inputs.data_ptr(), weight.data_ptr(), scale, y.data_ptr()),
        *(rows, size, width, torch.get_num_threads()),
    )
    return y


def unpacked(kind: Literal["int8", "int4"], weight: Tensor, scales: Tensor, width: int) -> Tensor:
    """W [N, K] in float32, of what `few_rows` takes."""
    assert _native is not None
    y = weight.new_empty((len(weight), width), dtype=torch.float32)
    where = (KIND_NUMBERS[kind], weight.data_ptr(), scales.data_ptr(), y.data_ptr())
    _native.unpack(*where, len(weight), width, _threads(y.numel()))
    return y


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    x, width = x.contiguous(), x.shape[-1]
    y = torch.empty_like(x)
    rms_norm_into(x.view(1, 1, -1, width), weight, eps, y.view(1, 1, -1, width))
    return y


def rms_norm_into(x: Tensor, weight: Tensor | None, eps: float, y: Tensor) -> None:
    """`rms_norm` of [B, H, L, Dh], written to a tensor of its size; only the last axes must be contiguous."""
    assert _native is not None
    weight = None if weight is None else weight.contiguous()
    (*sizes, width), (*x_steps, x_step), (*y_steps, y_step) = x.shape, x.stride(), y.stride()
    assert y.shape == x.shape and x_step == y_step == 1 and (weight is None or weight.shape == (width,))
    _native.rms_norm(
        *(x.data_ptr(), 0 if weight is None else weight.data_ptr(), y.data_ptr()),
        *(sizes[0], sizes[1], sizes[2], x_steps[0], x_steps[1], x_steps[2], y_steps[0], y_steps[1], y_steps[2]),
        *(width, eps, _threads(x.numel())),
    )


def silu_gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for both side by side, gate first: [..., 2 K] to [..., K]."""
    assert _native is not None
    gate_up, width = gate_up.contiguous(), gate_up.shape[-1] // 2
    assert gate_up.shape[-1] == 2 * width
    y = gate_up.new_empty(*gate_up.shape[:-1], width)
    threads = _threads(8 * y.numel())
    _native.silu_gate(gate_up.data_ptr(), y.data_ptr(), y.numel() // width, width, threads)
    return y


def gelu_tanh_(x: Tensor) -> Tensor:
    """The GELU approximated by tanh, in the memory of x, which lies in one piece."""
    assert _native is not None and x.is_contiguous()
    _native.gelu_tanh(x.data_ptr(), x.numel(), _threads(16 * x.numel()))
    if not x.is_inference():
        increment_version(x)
    return x


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, by_halves: bool) -> Tensor:
    """Heads [B, H, L, Dh] turned by contiguous tables [B or 1, L, Dh / 2]: the first half paired with the second, or
    neighbours. Only the last axis of x must be contiguous."""
    assert _native is not None
    (rows, heads, length, width), (row_step, head_step, token_step, step) = x.shape, x.stride()
    assert step == 1 and cos.shape == sin.shape == (len(cos), length, width // 2) and len(cos) in (1, rows)
    y = x.new_empty(x.shape)
    table_step = 0 if len(cos) == 1 else length * (width // 2)
    _native.rotate(
        *(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), rows, heads, length, width),
        *(row_step, head_step, token_step, table_step, by_halves, _threads(x.numel())),
    )
    return y


def one_query(queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None, scale: float) -> Tensor:
    """softmax(scale q k^T) v for one query a row and head, in float32: queries [B, H, 1, Dh], keys and values [B, Hkv,
    Lk, Dh] in float32 or bfloat16, of which row b sees the first `lengths[b]` [B] int64 (None: all); zeros for one that
    sees none.

    Only the last axes must be contiguous, and Dh a multiple of 8.
    """
    assert _native is not None
    rows, heads, _, width = queries.shape
    _, kv_heads, num_keys, _ = keys.shape
    assert width % 8 == 0 and keys.stride(3) == values.stride(3) == 1 and keys.dtype is values.dtype
    assert keys.shape == values.shape == (rows, kv_heads, num_keys, width) and heads % kv_heads == 0
    inputs = queries.float().contiguous()
    y = torch.empty_like(inputs)
    starts = [torch.arange(rows, device="cpu") * each.stride(0) for each in (keys, values)]
    _native.one_query(
        *(inputs.data_ptr(), keys.data_ptr(), values.data_ptr(), y.data_ptr()),
        *(starts[0].data_ptr(), starts[1].data_ptr(), 0 if lengths is None else lengths.data_ptr()),
        *(rows, heads, kv_heads, num_keys, width),
        *(keys.stride(1), keys.stride(2), values.stride(1), values.stride(2)),
        *(scale, keys.dtype is torch.bfloat16, _threads(rows * heads * num_keys * width)),
    )
    return y


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenPlaces:
    """Where rows keep their tokens' keys and values: `size` tokens of row b at a time, the n-th at `starts[b, n]`, in
    numbers from the beginnings `keys` and `values` of each block's buffers.

    From head to head it is `head_step` numbers, from token to token `token_step`. `lengths` are those that rows hold,
    the new one too. `heads` and `head_width` are those of keys and values.
    """

    keys: Tensor  # [blocks] int64, addresses
    values: Tensor  # [blocks] int64, addresses
    starts: Tensor  # [B, T] int64
    lengths: Tensor  # [B] int64
    size: int
    heads: int
    head_width: int
    head_step: int
    token_step: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls, halves: Sequence[Sequence[Tensor]], chosen: Tensor, lengths: Tensor, *, head_axis: Literal[1, 2]
    ) -> "TokenPlaces":
        """Of each block's keys and values: stretches of the same layout, heads on `head_axis`, tokens on the other one,
        of which row b has those `chosen` [B, T]."""
        first, token_axis = halves[0][0], 3 - head_axis
        addresses = torch.tensor([[half.data_ptr() for half in both] for both in halves], device="cpu")
        keys, values = addresses.T.contiguous()
        return cls(
            keys=keys,
            values=values,
            starts=chosen * first.stride(0),
            lengths=lengths,
            size=first.shape[token_axis],
            heads=first.shape[head_axis],
            head_width=first.shape[3],
            head_step=first.stride(head_axis),
            token_step=first.stride(token_axis),
            dtype=first.dtype,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockTable:
    """What `one_token` reads of a stack of blocks: `addresses` [blocks, 28] int64 (`native/stack.c`), `reals` [blocks,
    3] float32 (the norms' epsilon, that of the heads' norms, the factor on scores), sizes, and the tensors it all
    points to, so that they stay."""

    addresses: Tensor
    reals: Tensor
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    kept: tuple[Tensor, ...]

    def fits(self, x: Tensor, cos: Tensor, places: TokenPlaces) -> bool:
        """Whether rows [B, 1, D], their rotary tables and where their tokens lie are as the blocks take them."""
        rows, _, width = x.shape
        sizes = (places.heads, places.head_width, len(places.keys), len(places.starts), len(places.lengths))
        if sizes != (self.kv_heads, self.head_width, len(self.addresses), rows, rows) or places.dtype is not x.dtype:
            return False
        return width == self.width and cos.shape[1:] == (1, self.head_width // 2) and len(cos) in (1, rows)


def one_token(table: BlockTable, x: Tensor, cos: Tensor, sin: Tensor, places: TokenPlaces) -> None:
    """Run a stack of blocks on one new token of each row, in place: x [B, 1, D] float32. The new keys and values are
    written to their places. Tables [B or 1, 1, Dh / 2] are contiguous; all must fit (`BlockTable.fits`)."""
    assert _native is not None
    rows, _, width = x.shape
    _native.one_token(
        *(table.addresses.data_ptr(), table.reals.data_ptr(), len(table.addresses), x.data_ptr()),
        *(cos.data_ptr(), sin.data_ptr(), 0 if len(cos) == 1 else cos.shape[-1]),
        *(places.keys.data_ptr(), places.values.data_ptr(), places.starts.data_ptr(), places.lengths.data_ptr()),
        *(rows, width, table.heads, table.kv_heads, table.head_width, table.hidden),
        *(int(places.lengths.max()), places.starts.shape[1], places.size, places.head_step, places.token_step),
        *(places.dtype is torch.bfloat16, torch.get_num_threads()),
    )


def _threads(operations: int) -> int:
    return torch.get_num_threads() if operations >= _SMALLEST else 1
