"""Products on a CPU are those of `nn.Linear`."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from calotype.core.ops import row_product
from calotype.core.ops.row_product import Linear, linear


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "shape", [(1, 300), (300,), (1, 1, 300), (2, 300), (3, 2, 300), (16, 300), (17, 300), (2, 256, 300)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_that_of_linear(threads: int, shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = Linear(300, 900, bias=bias)
    x = torch.randn(shape)
    with torch.no_grad():
        expected = functional.linear(x, layer.weight, layer.bias)
        found = layer(x)
    assert found.shape == expected.shape and found.is_contiguous()
    assert torch.allclose(found, expected, atol=1e-6)


def test_large_matrices_take_the_other_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain product stands behind what is not a large float32 matrix without gradients, and for want of oneDNN."""
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


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_inputs_may_lie_anywhere(rows: int) -> None:
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
