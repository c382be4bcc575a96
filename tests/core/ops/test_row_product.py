"""Products on a CPU are those of `nn.Linear`."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from calotype.core.ops import kernels, row_product
from calotype.core.ops.row_product import Linear, WideLinear, add_wide_product, linear, working_dtype


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["our kernel", "torch's alone"])
def with_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both with our kernel and as where it was not built."""
    if request.param == "our kernel":
        if not kernels.IS_BUILT:
            pytest.skip("our kernels are not built here")
        return True
    monkeypatch.setattr(kernels, "_native", None)
    return False


@pytest.mark.parametrize(
    "shape", [(1, 300), (300,), (1, 1, 300), (2, 300), (3, 2, 300), (16, 300), (17, 300), (2, 256, 300)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_that_of_linear(threads: int, shape: tuple[int, ...], bias: bool, with_kernel: bool) -> None:
    torch.manual_seed(0)
    layer = Linear(300, 900, bias=bias)
    x = torch.randn(shape)
    with torch.no_grad():
        expected = functional.linear(x, layer.weight, layer.bias)
        found = layer(x)
    assert found.shape == expected.shape and found.is_contiguous()
    assert torch.allclose(found, expected, atol=1e-6)


def test_large_matrices_take_the_other_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without our kernel, the plain product stands behind what is not a large float32 matrix without gradients, and for
    want of oneDNN."""
    monkeypatch.setattr(kernels, "_native", None)
    monkeypatch.setattr(row_product, "_HAS_BFLOAT16", True)
    calls: list[int] = []
    plain = functional.linear

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(len(x))
        return plain(x, weight, bias)

    monkeypatch.setattr(row_product.functional, "linear", counted)
    large, small = torch.randn(1024, 512), torch.randn(64, 512)
    with torch.no_grad():
        for rows in (1, 2, 16) + ((256,) if torch.backends.mkldnn.is_available() else ()):
            linear(torch.randn(rows, 512), large)
        assert calls == []
        linear(torch.randn(17, 512), large)
        linear(torch.randn(1, 512), small)
        linear(torch.randn(3, 512).bfloat16(), large.bfloat16())
        linear(torch.randn(4, 1024), torch.randn(1024, 1024).T)
        linear(torch.randn(257, 2048), large.view(256, 2048))
        linear(torch.randn(2, 255, 512), large)
        monkeypatch.setattr(row_product, "_HAS_ONEDNN", False)
        linear(torch.randn(258, 512), large)
    assert calls == [17, 1, 3, 4, 257, 2, 258]
    linear(torch.randn(5, 512), large)
    assert calls[-1] == 5


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_go_to_our_kernel(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.IS_BUILT:
        pytest.skip("our kernels are not built here")
    torch.manual_seed(0)
    layer, x = Linear(91, 77).to(dtype), torch.randn(rows, 91).to(dtype)
    monkeypatch.setattr(row_product.functional, "linear", None)
    with torch.no_grad():
        y = layer(x)
        each = torch.cat([layer(row[None]) for row in x])
        wanted = x.double() @ layer.weight.double().T + layer.bias.double()
    assert y.dtype == dtype and torch.equal(y, each)
    assert float((y.double() - wanted).norm() / wanted.norm()) < (1e-6 if dtype == torch.float32 else 4e-3)


def test_sizes_that_do_not_fit_are_torchs_errors(with_kernel: bool) -> None:
    with torch.no_grad():
        for x, weight in ((torch.randn(1, 32), torch.randn(4, 16)), (torch.randn(4, 8), torch.randn(4, 16))):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                linear(x, weight)


def test_what_our_kernel_does_not_take(with_kernel: bool) -> None:
    """No rows, no inputs, other dtypes, weights that do not lie in one piece, gradients."""
    cases = [(torch.randn(0, 512), torch.randn(600, 512)), (torch.randn(2, 0), torch.randn(600, 0))]
    cases += [(torch.randn(2, 512).double(), torch.randn(600, 512).double())]
    cases += [(torch.randn(2, 600), torch.randn(600, 512).T)]
    with torch.no_grad():
        for x, weight in cases:
            torch.testing.assert_close(linear(x, weight), functional.linear(x, weight))
    weight = torch.randn(600, 512, requires_grad=True)
    linear(torch.randn(2, 512), weight).sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0


@pytest.mark.parametrize("rows", [20, 300])
@pytest.mark.parametrize("kind", [Linear, WideLinear])
def test_bfloat16_without_products_of_its_own(
    kind: type[Linear] | type[WideLinear], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows are multiplied in float32 and rounded once; where a gradient may follow, torch does it."""
    monkeypatch.setattr(row_product, "_HAS_BFLOAT16", False)
    monkeypatch.setattr(row_product, "_PIECE", 300 * 250)
    torch.manual_seed(0)
    layer, x = kind(300, 900).bfloat16(), torch.randn(2, rows, 300).bfloat16()
    with torch.no_grad():
        wanted = functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        torch.testing.assert_close(layer(x), wanted.bfloat16(), atol=1e-6, rtol=2**-7)
        assert float((layer(x).double() - wanted).norm() / wanted.norm()) < 2e-3
    layer(x).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.bfloat16


@pytest.mark.parametrize("rows", [1, 20, 300])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [Linear, WideLinear])
def test_float32_rows_meet_weights_in_bfloat16(
    kind: type[Linear] | type[WideLinear], bias: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the weights were float32, a few outputs at a time; small matrices too, and with gradients."""
    monkeypatch.setattr(row_product, "_PIECE", 300 * 250)
    torch.manual_seed(0)
    for size in (900, 7):
        layer, x = kind(300, size, bias=bias).bfloat16(), torch.randn(2, rows, 300)
        given = None if layer.bias is None else layer.bias.float()
        wanted = functional.linear(x, layer.weight.float(), given)
        with torch.no_grad():
            torch.testing.assert_close(layer(x), wanted, atol=1e-5, rtol=1e-5)
        layer(x).sum().backward()
        assert layer.weight.grad is not None and bool((layer.weight.grad != 0).all())


@torch.no_grad()
def test_few_float32_rows_go_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.IS_BUILT:
        pytest.skip("our kernels are not built here")
    monkeypatch.setattr(row_product, "_by_float32", None)
    torch.manual_seed(0)
    layer, x = Linear(300, 900).bfloat16(), torch.randn(2, 300)
    wanted = functional.linear(x, layer.weight.float(), layer.bias.float())
    torch.testing.assert_close(layer(x), wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what jvp imports
def test_mixed_products_are_transformed() -> None:
    layer, x = WideLinear(300, 900).bfloat16(), torch.randn(3, 4, 300)
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x), atol=1e-5, rtol=1e-5)
    _, slope = torch.func.jvp(layer, (x,), (x,))
    torch.testing.assert_close(slope, functional.linear(x, layer.weight.float()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("has_products", [False, True])
def test_products_are_added_in_place(
    dtypes: tuple[torch.dtype, torch.dtype], has_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_product, "_HAS_BFLOAT16", has_products)
    monkeypatch.setattr(row_product, "_PIECE", 300 * 250)
    torch.manual_seed(0)
    x, y = torch.randn(2, 20, 300).to(dtypes[0]), torch.randn(2, 20, 900).to(dtypes[0])
    weight = torch.randn(900, 400).to(dtypes[1])[:, 100:] / 20
    wanted = y.double() + functional.linear(x.double(), weight.double())
    with torch.no_grad():
        found = add_wide_product(y, x, weight)
    assert found is y
    tolerance = 1e-5 if dtypes[0] is torch.float32 else 2**-6
    torch.testing.assert_close(y.double(), wanted, atol=tolerance, rtol=tolerance)


def test_what_activations_are_kept_in(monkeypatch: pytest.MonkeyPatch) -> None:
    half, whole = torch.ones(1, dtype=torch.bfloat16), torch.ones(1)
    for has_products, wanted in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(row_product, "_HAS_BFLOAT16", has_products)
        with torch.no_grad():
            assert working_dtype(half) is wanted
            assert working_dtype(whole) is torch.float32 and working_dtype(half.half()) is torch.float16
            assert working_dtype(half.to("meta")) is torch.bfloat16
        assert working_dtype(half) is torch.bfloat16  # a gradient may follow


def test_wide_layers_are_torchs_in_other_dtypes() -> None:
    torch.manual_seed(0)
    layer, x = WideLinear(300, 900), torch.randn(3, 300)
    with torch.no_grad():
        assert torch.equal(layer(x), functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_inputs_may_lie_anywhere(rows: int, with_kernel: bool) -> None:
    """Views into wider rows, every second channel, rows and channels swapped."""
    torch.manual_seed(0)
    layer = Linear(300, 900)
    wide, sparse, swapped = torch.randn(rows, 2, 700), torch.randn(rows, 600), torch.randn(300, rows)
    with torch.no_grad():
        for x in (wide[:, 1, 50:350], wide[:, 1:, 50:350], sparse[:, ::2], swapped.T):
            assert torch.allclose(layer(x), functional.linear(x, layer.weight, layer.bias), atol=1e-6)


def test_gradients_flow() -> None:
    layer = Linear(512, 1024)
    layer(torch.randn(1, 512)).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.norm() > 0
