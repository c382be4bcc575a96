"""Our kernels in C give what torch's operations give."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional

from calotype.core import norms, rotary
from calotype.core.mlp import gelu
from calotype.core.norms import RMSNorm
from calotype.core.ops import kernels
from calotype.core.ops.packed import PackedLinear
from calotype.core.ops.row_product import Linear
from calotype.core.rotary import RotaryConfig, apply_rotary, rotary_table

pytestmark = pytest.mark.skipif(not kernels.IS_BUILT, reason="our kernels are not built here")


@pytest.fixture(params=[1, 3], autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Alone, and shared among threads however little there is to do."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(kernels, "_SMALLEST", 0)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("width", [1, 7, 8, 20, 64, 576])
def test_rms_norm(width: int) -> None:
    x, weight = torch.randn(3, 5, width)[:, ::2], torch.randn(width)
    assert relative(kernels.rms_norm(x, weight, 1e-5), functional.rms_norm(x, (width,), weight, 1e-5)) < 1e-6
    assert relative(kernels.rms_norm(x, None, 1e-5), functional.rms_norm(x, (width,), None, 1e-5)) < 1e-6
    assert not kernels.rms_norm(torch.zeros(2, width), weight, 1e-6).any()


def test_norms_of_heads_anywhere() -> None:
    """Queries and keys out of one matrix, each through a norm of its own."""
    qkv, first, second = torch.randn(2, 5, 3 * 4 * 24), RMSNorm(24), RMSNorm(24, eps=1e-3, affine=False)
    nn.init.normal_(first.weight)
    heads = qkv.unflatten(-1, (12, 24)).transpose(1, 2)[:, :8]
    out = torch.empty(2, 8, 9, 24)[:, :, 2:7]
    norms.norm_halves(heads, first, second, out)
    assert first.weight is not None
    wanted = (
        functional.rms_norm(heads[:, :4], (24,), first.weight, 1e-6),
        functional.rms_norm(heads[:, 4:], (24,), None, 1e-3),
    )
    assert relative(out, torch.cat(wanted, dim=1)) < 1e-6


def test_the_layer_takes_it_where_it_may() -> None:
    norm, x = RMSNorm(24), torch.randn(4, 24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms.functional, "rms_norm", None)
        patch.setattr(norms, "_rms_norm", None)
        y = norm(x)
    with torch.enable_grad():
        assert relative(y, norm(x).detach()) < 1e-6


@pytest.mark.parametrize("width", [1, 8, 13, 96])
def test_silu_gate(width: int) -> None:
    x = 5 * torch.randn(4, 2, 2 * width)
    gate, up = x.chunk(2, dim=-1)
    assert relative(kernels.silu_gate(x), functional.silu(gate) * up) < 1e-6


def test_silu_of_the_largest_numbers_and_of_no_numbers() -> None:
    gates = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, torch.inf, torch.nan])
    y = kernels.silu_gate(torch.cat((gates, torch.ones(9))))
    assert torch.allclose(y[:7], functional.silu(gates[:7]), atol=1e-30) and y[7] == torch.inf and y[8].isnan()


@pytest.mark.parametrize("count", [1, 8, 13, 1000])
def test_gelu(count: int) -> None:
    x = 4 * torch.randn(count)
    wanted = functional.gelu(x.double(), approximate="tanh")
    assert kernels.gelu_tanh_(x) is x and relative(x, wanted) < 5e-6
    extremes = torch.tensor([torch.inf, torch.nan, -1e30, 1e30])
    assert gelu(extremes, "tanh").nan_to_num(7.0, 9.0).tolist() == [9.0, 7.0, 0.0, extremes[3].item()]


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("width", "batch", "length"), [(64, 2, 3), (10, 1, 1), (2, 1, 4), (36, 3, 1)])
def test_rotate(pairing: rotary.Pairing, width: int, batch: int, length: int) -> None:
    table = rotary_table(
        RotaryConfig(axes=(width,), pairing=pairing), torch.arange(batch * length).view(batch, length, 1)
    )
    x = torch.randn(batch, length, 5, width).transpose(1, 2)
    found = apply_rotary(x, table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_native", None)
        wanted = apply_rotary(x, table)
    assert relative(found, wanted) < 1e-6 and found.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "num_keys", "width"),
    [(1, 9, 3, 37, 64), (3, 4, 4, 8, 128), (2, 8, 2, 1, 40), (2, 2, 1, 300, 256)],
)
def test_one_query(dtype: torch.dtype, rows: int, heads: int, kv_heads: int, num_keys: int, width: int) -> None:
    torch.manual_seed(0)
    queries = torch.randn(rows, heads, 1, width)
    keys = torch.randn(rows, kv_heads, num_keys + 5, width).to(dtype)[:, :, 2 : num_keys + 2]
    values = torch.randn(rows, num_keys, kv_heads, width).to(dtype).transpose(1, 2)
    lengths = torch.randint(1, num_keys + 1, (rows,))
    mask = (torch.arange(num_keys) < lengths[:, None])[:, None, None]
    for seen, bias in ((lengths, mask), (None, None)):
        wanted = functional.scaled_dot_product_attention(
            queries, keys.float(), values.float(), attn_mask=bias, scale=0.3, enable_gqa=True
        )
        assert relative(kernels.one_query(queries, keys, values, seen, 0.3), wanted) < 2e-6


def test_a_row_without_keys_gives_zeros() -> None:
    queries, keys = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 3, 8)
    y = kernels.one_query(queries, keys, keys, torch.tensor([0, 2]), 1.0)
    assert not y[0].any() and y[1].all()


def test_what_is_not_a_number_stays_so() -> None:
    queries, keys = torch.rand(1, 2, 1, 8), torch.randn(1, 2, 9, 8)
    for value in (torch.nan, torch.inf):
        broken = keys.clone()
        broken[0, 0, 4, 3] = value
        assert kernels.one_query(queries, broken, keys, None, 1.0).isfinite().all(-1).flatten().tolist() == [
            False,
            True,
        ]
    assert kernels.rms_norm(torch.tensor([[1.0, torch.nan]]), None, 1e-6).isnan().all()


def test_they_run_on_plain_numbers_without_gradients_alone() -> None:
    x = torch.randn(2, 3)
    assert kernels.runs(x, x) and kernels.runs(nn.Parameter(x)) and not kernels.runs(x, x.double())
    assert not kernels.runs(torch.empty(2, device="meta")) and kernels.may_run(x.double())
    with torch.enable_grad():
        assert not kernels.runs(x)
    with torch.autocast("cpu"):
        assert not kernels.runs(x)
    with FakeTensorMode() as mode:
        assert not kernels.runs(mode.from_tensor(x))
    with forward_ad.dual_level():
        assert not kernels.runs(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_native", None)
        assert not kernels.runs(x)


def test_what_stands_for_tensors_goes_torchs_way() -> None:
    """Function transforms and traces get what they would without our kernels."""
    layer, x = nn.Sequential(RMSNorm(24), Linear(24, 8, bias=False)), torch.randn(4, 24)
    wanted = layer(x)
    torch.testing.assert_close(torch.vmap(layer)(x), wanted)
    with warnings.catch_warnings(action="ignore"):  # of what torch means to drop
        torch.testing.assert_close(torch.func.jvp(layer, (x,), (torch.zeros_like(x),))[0], wanted)
        traced = torch.jit.trace(layer, (x,))
    torch.testing.assert_close(traced(2 * x), layer(2 * x))


def test_defaults_of_others_do_not_matter() -> None:
    """A default device or dtype of the caller's."""
    packed, x = PackedLinear(torch.randn(40, 64), None, "int8"), torch.randn(40, 64)
    queries, keys = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8)
    wanted = packed(x), packed(x[:2]), kernels.one_query(queries, keys, keys, None, 1.0)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        found = packed(x), packed(x[:2]), kernels.one_query(queries, keys, keys, None, 1.0)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(map(torch.equal, found, wanted))


def test_weights_may_lie_apart_and_must_fit() -> None:
    norm, x, wide = RMSNorm(24), torch.randn(4, 24), torch.randn(24, 3)
    norm.weight = nn.Parameter(wide[:, 1], requires_grad=False)
    assert relative(norm(x), functional.rms_norm(x, (24,), wide[:, 1], 1e-6)) < 1e-6
    with pytest.raises(RuntimeError):
        norm(torch.randn(4, 48))
