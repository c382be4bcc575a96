import copy
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor, nn
from torch.nn import functional

from calotype.core.ops import packed_matrix
from calotype.core.ops.packed import PackedLinear, PackingReport, pack_linears
from calotype.core.ops.packed_matrix import Int4Kernel, Int8Kernel, Kind, OurKernel, W8A8Kernel
from calotype.core.ops.quantise import quantise_int4, quantise_int8, quantise_w8a8, values_int4, values_int8

KINDS: tuple[Kind, ...] = ("int8", "int4", "w8a8")


@pytest.fixture(params=["our kernel", "torch's kernels"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where our kernel was built, and as where it was not."""
    if request.param != "our kernel":
        monkeypatch.setattr(packed_matrix, "IS_BUILT", False)
    elif not packed_matrix.IS_BUILT:
        pytest.skip("our kernels are not built here")


@pytest.fixture
def only_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_matrix, "IS_BUILT", False)


def weight(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().float() - wanted.detach().float()).norm() / wanted.detach().float().norm())


def from_file(kind: str) -> Tensor:
    """A weight as it is read from a GGUF file."""
    rng = np.random.default_rng(0)
    if kind == "Q4_K":
        blocks = rng.integers(0, 256, (48, 144), dtype=np.uint8)
        blocks[:, :4] = rng.uniform(0.001, 0.01, (48, 2)).astype(np.float16).view(np.uint8)
        return torch.from_numpy(gguf.dequantize(blocks, GGMLQuantizationType.Q4_K).copy())
    code = GGMLQuantizationType[kind]
    array = gguf.quantize(weight(48, 256).numpy(), code)
    return torch.from_numpy(gguf.dequantize(array, code).copy())


def test_int8_errors_are_those_of_the_steps() -> None:
    w = weight(7, 50)
    quantised = quantise_int8(w, torch.float32)
    difference = (values_int8(quantised.numbers, quantised.scales, torch.float32) - w).abs()
    assert bool((difference <= quantised.scales[:, None] * 0.5001).all())
    assert quantised.error == pytest.approx(float(difference.norm() / w.norm()), rel=1e-5)
    assert 0.001 < quantise_int8(w).error < 0.01


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_weights_of_4_bit_files_keep_their_grids(kind: str) -> None:
    w = from_file(kind)
    exact, rounded = quantise_int4(w, torch.float32), quantise_int4(w)
    assert exact.error < 1e-5 and rounded.error < 0.004
    assert torch.equal(exact.numbers, rounded.numbers)
    assert relative(values_int4(exact.numbers, exact.scales, torch.float32), w) < 1e-5


def test_other_weights_get_16_values_from_least_to_largest() -> None:
    w = weight(5, 96)
    quantised = quantise_int4(w, torch.float32)
    groups = w.view(5, 3, 32)
    steps = (groups.amax(-1) - groups.amin(-1)) / 15
    assert torch.allclose(quantised.scales[..., 0].T, steps)
    assert bool(
        (
            (values_int4(quantised.numbers, quantised.scales, torch.float32) - w).abs().view(5, 3, 32)
            <= steps[..., None] * 0.5001
        ).all()
    )
    assert 0.03 < quantised.error < 0.1
    with pytest.raises(ValueError, match="50 inputs has no groups of 32"):
        quantise_int4(weight(4, 50))


def test_constant_weights() -> None:
    for w in (torch.zeros(16, 64), torch.full((16, 64), 0.5)):
        assert quantise_int8(w, torch.float32).error < 1e-6 and quantise_int4(w, torch.float32).error < 1e-6
        assert quantise_w8a8(w).error < 0.008


@pytest.mark.parametrize("inputs", [64, 33])
def test_neighbours_of_one_sign_stay_small_in_w8a8(inputs: int) -> None:
    w = torch.cat((weight(40, inputs), torch.full((2, inputs), 0.5), torch.zeros(1, inputs)))
    quantised = quantise_w8a8(w)
    assert quantised.error == pytest.approx(
        relative(values_int8(quantised.numbers, quantised.scales, torch.float32), w), rel=1e-3
    )
    pairs = quantised.numbers[:, : inputs // 2 * 2].int().unflatten(1, (-1, 2))
    largest = torch.maximum(pairs.clamp(min=0).sum(-1), -pairs.clamp(max=0).sum(-1)).amax(1)
    assert int(largest.max()) <= 128 and bool((largest[:40] >= 120).all())
    assert int(quantised.numbers[:40].abs().amax(1).min()) > 64


def test_large_weights_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight(37, 64)
    kinds = (quantise_int8, quantise_int4, quantise_w8a8)
    whole = [quantise(w) for quantise in kinds]
    monkeypatch.setattr("calotype.core.ops.quantise._CHUNK_WEIGHTS", 640)
    for before, after in zip(whole, [quantise(w) for quantise in kinds], strict=True):
        assert torch.equal(before.numbers, after.numbers) and torch.equal(before.scales, after.scales)
        assert before.error == pytest.approx(after.error)


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_agree_with_the_reference(kind: Kind, rows: int, dtype: torch.dtype) -> None:
    bias = torch.randn(48).to(dtype)
    layer = PackedLinear(weight(48, 64), bias, kind)
    x = torch.randn(2, 3 * rows, 64).to(dtype)[:, ::3]
    y = layer(x)
    assert y.shape == (2, rows, 48) and y.dtype == dtype
    limit = 0.015 if kind == "w8a8" else 0.01
    assert relative(y, functional.linear(x.float(), layer.unpacked(), bias.float())) < limit


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_runs_where_a_kernel_refuses(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = weight(48, 64), torch.randn(3, 64)
    with_kernel = PackedLinear(w, None, kind)
    with monkeypatch.context() as patch:
        for kernel in (OurKernel, Int8Kernel, Int4Kernel, W8A8Kernel):
            patch.setattr(kernel, "product", refuse)
        without = PackedLinear(w, None, kind)
    assert with_kernel.has_kernel and not without.has_kernel and "has_kernel=False" in str(without)
    assert relative(without.unpacked(), with_kernel.unpacked()) < 0.005
    assert relative(without(x), functional.linear(x, without.unpacked())) < 1e-6
    assert without.error == with_kernel.error


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("inputs", [32, 64, 608])
def test_our_kernel_multiplies_by_what_the_weights_became(kind: Kind, inputs: int) -> None:
    """With float32 activations; 4 bits round them to 16. Rows are what they are alone."""
    layer = PackedLinear(weight(33, inputs), None, kind)
    if not isinstance(layer.matrix, OurKernel):
        pytest.skip("our kernels are not built here")
    x = torch.randn(7, inputs) * torch.rand(inputs).mul(4).exp()
    x[3] = 0
    wanted = functional.linear(x.double(), layer.unpacked(torch.float64))
    assert relative(layer(x), wanted) < (1e-6 if kind == "int8" else 5e-5)
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x])) and not layer(x)[3].any()
    x[1, 5], x[2, 7] = torch.inf, torch.nan
    assert layer(x).isfinite().all(dim=1).tolist() == [True, False, False, True, True, True, True]


def refuse(*arguments: object) -> Tensor:
    raise RuntimeError("not here")


def test_w8a8_rows_are_what_they_are_alone() -> None:
    layer, x = PackedLinear(weight(48, 64), torch.randn(48), "w8a8"), torch.randn(5, 64)
    x[1] *= 1000
    x[2] = 0
    y = layer(x)
    assert torch.equal(y, torch.cat([layer(row[None]) for row in x]))
    assert layer.bias is not None and torch.equal(y[2], layer.bias)
    assert torch.equal(layer(x.T.contiguous().T), y) and layer(x[:0]).shape == (0, 48)


def test_w8a8_activations_cannot_overflow_the_kernels_sums() -> None:
    signs = torch.where(torch.rand(32, 64) < 0.5, -1.0, 1.0)
    x = torch.rand(4, 64) * 0.2 + 0.8  # as large as their row's scale takes, all of one sign
    for w in (torch.ones(16, 64), -torch.ones(16, 64), signs):
        layer = PackedLinear(w, None, "w8a8")
        for rows in (x, -x):
            assert relative(layer(rows), functional.linear(rows, layer.unpacked())) < 0.01


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_w8a8_passes_on_what_is_not_finite(value: float) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = value
    finite = PackedLinear(weight(48, 64), None, "w8a8")(x).isfinite().all(dim=1)
    assert finite.tolist() == [True, False, True]


def test_w8a8_leaves_torchs_settings_and_warnings_alone(
    recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    before = torch.backends.quantized.engine
    layer = PackedLinear(weight(48, 64), None, "w8a8")
    layer(torch.randn(2, 64))
    assert torch.backends.quantized.engine == before and not recwarn.list
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_layer_and_copies_its_matrix(kind: Kind) -> None:
    layer = PackedLinear(weight(48, 64), torch.randn(48), kind)
    inputs = [torch.randn(2, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(16)]
    wanted = [layer(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(layer, inputs), wanted))
    copied = copy.deepcopy(layer)
    assert copied.matrix is layer.matrix and torch.equal(copied(inputs[0]), wanted[0])


@pytest.mark.usefixtures("only_torchs")
def test_4_bits_need_groups_of_inputs_and_kernels_need_multiples_of_16_outputs() -> None:
    narrow = PackedLinear(weight(16, 40), None, "int4")
    assert narrow.kind == "int8" and narrow.report("a", 1).kind == "int8"
    odd = PackedLinear(weight(9, 64), None, "int4")
    assert odd.kind == "int4" and not odd.has_kernel
    assert relative(odd.unpacked(), weight(9, 64)) == pytest.approx(odd.error, rel=1e-3)


def net() -> nn.Module:
    torch.manual_seed(0)
    shared = nn.Linear(64, 32)
    return nn.ModuleDict(
        {"a": nn.Sequential(nn.Linear(64, 64), nn.GELU()), "b": shared, "again": shared, "router": nn.Linear(64, 4)}
    )


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("kind", KINDS)
def test_linears_are_replaced_and_reported(kind: Kind) -> None:
    module, x = net(), torch.randn(2, 64)
    before = [module["a"](x), module["b"](x)]
    report = pack_linears(module, kind, skip=lambda name: name == "router")
    assert [each.name for each in report.weights] == ["a.0", "b"]
    assert module["b"] is module["again"] and type(module["router"]) is nn.Linear
    assert report.bytes_before == 4 * (64 * 64 + 32 * 64)
    assert report.bytes_after == sum(each.matrix.bytes for each in (module["a"][0], module["b"]))
    limit = {"int8": 0.01, "int4": 0.1, "w8a8": 0.012}[kind]
    assert report.worst is not None and 0 < report.mean_error <= report.worst.error < limit
    assert report.bytes_after < report.bytes_before * {"int8": 0.27, "int4": 0.26, "w8a8": 0.29}[kind]
    after = [module["a"](x), module["b"](x)]
    assert all(0 < relative(*pair) < 2 * limit for pair in zip(after, before, strict=True))
    assert "2 weights packed, 0.0 to 0.0 MiB; relative error" in str(report)


def test_nothing_to_pack() -> None:
    report = pack_linears(nn.Sequential(nn.GELU()), "int8")
    assert report == PackingReport(weights=()) and report.worst is None and report.mean_error == 0
    assert str(report) == "nothing was packed"


def test_what_cannot_be_packed_is_refused_and_left_alone() -> None:
    module = net()
    with pytest.raises(ValueError, match="weights cannot be packed as 'int2'; known are int8, int4, w8a8"):
        pack_linears(module, "int2")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="below a module; use PackedLinear"):
        pack_linears(nn.Linear(2, 2), "int8")
    module["again"] = nn.Linear(64, 64, device="meta")
    with pytest.raises(ValueError, match="cannot pack again: it is on the meta device"):
        pack_linears(module, "int8")
    assert type(module["b"]) is nn.Linear


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("kind", KINDS)
def test_packed_layers_keep_their_scales_and_cannot_be_saved(kind: Kind) -> None:
    layer = PackedLinear(weight(16, 64), torch.zeros(16), kind)
    before = layer.matrix
    moved = nn.Sequential(layer).to(torch.float64)
    assert layer.matrix is before and layer.bias is not None and layer.bias.dtype == torch.float64
    assert moved(torch.ones(1, 64, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(ValueError, match="0 is packed and cannot be saved"):
        moved.state_dict()
    if not isinstance(layer.matrix, Int4Kernel | W8A8Kernel):
        assert layer.to("meta")(torch.ones(1, 64, device="meta")).is_meta
        return
    with pytest.raises(ValueError, match="packed for the CPU cannot go to meta"):
        layer.to("meta")


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("kind", KINDS)
def test_a_single_vector(kind: Kind) -> None:
    layer, x = PackedLinear(weight(48, 64), torch.randn(48), kind), torch.randn(64)
    torch.testing.assert_close(layer(x), layer(x[None])[0])


@pytest.mark.usefixtures("only_torchs")
def test_without_a_kernel_weights_can_move() -> None:
    layer = PackedLinear(weight(9, 64), torch.zeros(9), "int4")
    assert not layer.has_kernel and layer.to("meta")(torch.ones(1, 64, device="meta")).is_meta


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_unpacking_is_that_of_the_reference(kind: Kind) -> None:
    """In float32 by our kernel, in other dtypes by torch's operations."""
    layer = PackedLinear(weight(33, 96), None, kind)
    if not isinstance(layer.matrix, OurKernel):
        pytest.skip("our kernels are not built here")
    assert relative(layer.unpacked(), layer.unpacked(torch.float64)) < 1e-6
    x = torch.randn(40, 96)
    assert relative(layer(x), functional.linear(x.double(), layer.unpacked(torch.float64))) < 1e-6


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_gradients_reach_what_goes_in(kind: Kind) -> None:
    layer = PackedLinear(weight(48, 64), None, kind)
    for rows in (2, 40):
        x = torch.randn(rows, 64, requires_grad=True)
        y = layer(x)
        if isinstance(layer.matrix, OurKernel):
            y.sum().backward()
            assert x.grad is not None
            torch.testing.assert_close(x.grad, layer.unpacked().sum(0).expand(rows, -1), atol=1e-4, rtol=1e-4)


def test_inputs_that_do_not_fit_our_kernel_are_refused() -> None:
    layer = PackedLinear(weight(48, 64), None, "int8")
    if not isinstance(layer.matrix, OurKernel):
        pytest.skip("our kernels are not built here")
    with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be multiplied"):
        layer(torch.randn(2, 32))
