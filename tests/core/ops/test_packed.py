import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor, nn
from torch.nn import functional

from calotype.core.ops import packed as module_under_test
from calotype.core.ops.packed import Kind, PackedLinear, PackingReport, pack_linears
from calotype.core.ops.quantise import quantise_int4, quantise_int8, values_int4, values_int8

KINDS: tuple[Kind, ...] = ("int8", "int4")


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


def test_large_weights_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight(37, 64)
    whole = [quantise(w) for quantise in (quantise_int8, quantise_int4)]
    monkeypatch.setattr("calotype.core.ops.quantise._CHUNK_WEIGHTS", 640)
    for before, after in zip(whole, (quantise_int8(w), quantise_int4(w)), strict=True):
        assert torch.equal(before.numbers, after.numbers) and torch.equal(before.scales, after.scales)
        assert before.error == pytest.approx(after.error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_agree_with_the_reference(kind: Kind, rows: int, dtype: torch.dtype) -> None:
    bias = torch.randn(48).to(dtype)
    layer = PackedLinear(weight(48, 64), bias, kind)
    x = torch.randn(2, 3 * rows, 64).to(dtype)[:, ::3]
    y = layer(x)
    assert y.shape == (2, rows, 48) and y.dtype == dtype
    assert relative(y, functional.linear(x.float(), layer.unpacked(), bias.float())) < 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_runs_where_a_kernel_refuses(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = weight(48, 64), torch.randn(3, 64)
    with_kernel = PackedLinear(w, None, kind)
    monkeypatch.setattr(module_under_test, "_product", refuse)
    without = PackedLinear(w, None, kind)
    assert not without.has_kernel and "has_kernel=False" in str(without)
    monkeypatch.undo()
    assert relative(without.unpacked(), with_kernel.unpacked()) < 0.005
    assert relative(without(x), functional.linear(x, without.unpacked())) < 1e-6
    assert without.error == with_kernel.error


def refuse(*arguments: object) -> Tensor:
    raise RuntimeError("not here")


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


@pytest.mark.parametrize("kind", KINDS)
def test_linears_are_replaced_and_reported(kind: Kind) -> None:
    module, x = net(), torch.randn(2, 64)
    before = [module["a"](x), module["b"](x)]
    report = pack_linears(module, kind, skip=lambda name: name == "router")
    assert [each.name for each in report.weights] == ["a.0", "b"]
    assert module["b"] is module["again"] and type(module["router"]) is nn.Linear
    assert report.bytes_before == 4 * (64 * 64 + 32 * 64)
    assert report.bytes_after == sum(module[n].packed.nbytes + module[n].scales.nbytes for n in "b") + (
        module["a"][0].packed.nbytes + module["a"][0].scales.nbytes
    )
    limit = {"int8": 0.01, "int4": 0.1}[kind]
    assert report.worst is not None and 0 < report.mean_error <= report.worst.error < limit
    assert report.bytes_after < report.bytes_before * {"int8": 0.27, "int4": 0.26}[kind]
    after = [module["a"](x), module["b"](x)]
    assert all(0 < relative(*pair) < 2 * limit for pair in zip(after, before, strict=True))
    assert "2 weights packed, 0.0 to 0.0 MiB; relative error" in str(report)


def test_nothing_to_pack() -> None:
    report = pack_linears(nn.Sequential(nn.GELU()), "int8")
    assert report == PackingReport(weights=()) and report.worst is None and report.mean_error == 0
    assert str(report) == "nothing was packed"


def test_what_cannot_be_packed_is_refused_and_left_alone() -> None:
    module = net()
    with pytest.raises(ValueError, match="weights cannot be packed as 'int2'; known are int8, int4"):
        pack_linears(module, "int2")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="below a module; use PackedLinear"):
        pack_linears(nn.Linear(2, 2), "int8")
    module["again"] = nn.Linear(64, 64, device="meta")
    with pytest.raises(ValueError, match="cannot pack again: it is on the meta device"):
        pack_linears(module, "int8")
    assert type(module["b"]) is nn.Linear


def test_packed_layers_keep_their_scales_and_cannot_be_saved() -> None:
    layer = PackedLinear(weight(16, 64), torch.zeros(16), "int4")
    moved = nn.Sequential(layer).to(torch.float64)
    assert layer.scales.dtype == torch.bfloat16 and layer.bias is not None and layer.bias.dtype == torch.float64
    assert moved(torch.ones(1, 64, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(ValueError, match="0 is packed and cannot be saved"):
        moved.state_dict()
    with pytest.raises(ValueError, match="cannot go to meta"):
        layer.to("meta")
    assert PackedLinear(weight(16, 64), None, "int8").to("meta").packed.is_meta
