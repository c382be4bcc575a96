"""Norms, feed-forward layers and modulation against their formulas."""

import math

import pytest
import torch
from torch import nn

from calotype.core.mlp import GELUMLP, GatedMLP
from calotype.core.modulation import Modulation, ScaleGate, ShiftScaleGate, Unmodulated
from calotype.core.norms import LayerNorm, RMSNorm


@torch.no_grad()
def randomise(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.normal_()


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm(affine: bool) -> None:
    norm = RMSNorm(6, eps=0.1, affine=affine)
    randomise(norm)
    x = 3 * torch.randn(2, 3, 6)
    expected = x / (x.pow(2).sum(-1, keepdim=True) / 6 + 0.1).sqrt()
    if norm.weight is not None:
        expected = expected * norm.weight
    torch.testing.assert_close(norm(x), expected)
    assert len(list(norm.parameters())) == int(affine)


def test_rms_norm_with_an_offset_is_new_at_one() -> None:
    norm, x = RMSNorm(6, eps=0.1, offset=1.0), torch.randn(2, 6)
    assert norm.weight is not None
    assert torch.equal(norm.weight, torch.zeros(6))
    torch.testing.assert_close(norm(x), RMSNorm(6, eps=0.1)(x))
    randomise(norm)
    torch.testing.assert_close(norm(x), RMSNorm(6, eps=0.1, affine=False)(x) * (norm.weight + 1))
    half = norm.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), norm.float()(x.bfloat16().float()), rtol=1e-2, atol=1e-2)


def test_rms_norm_takes_another_dtype_than_its_weights() -> None:
    norm, x = RMSNorm(6), torch.randn(2, 6).bfloat16()
    randomise(norm)
    torch.testing.assert_close(norm(x), RMSNorm(6, affine=False)(x) * norm.weight)


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(affine: bool) -> None:
    norm = LayerNorm(6, eps=0.1, affine=affine)
    randomise(norm)
    x = 3 * torch.randn(2, 3, 6) + 5
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 0.1).sqrt()
    if norm.weight is not None and norm.bias is not None:
        expected = expected * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-5)
    assert len(list(norm.parameters())) == 2 * int(affine)


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_statistics_are_taken_in_float32(norm: type[RMSNorm] | type[LayerNorm]) -> None:
    x = (200 * torch.randn(4, 512)).half()  # the squares do not fit float16
    out = norm(512).half()(x)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), norm(512)(x.float()), rtol=2e-3, atol=2e-3)


def test_the_gated_mlp_has_the_gate_first() -> None:
    mlp = GatedMLP(4, 6, bias=True)
    randomise(mlp)
    x = torch.randn(2, 3, 4)
    gate, up = (x @ mlp.gate_up.weight.T + mlp.gate_up.bias).split(6, dim=-1)
    expected = (gate / (1 + torch.exp(-gate)) * up) @ mlp.down.weight.T + mlp.down.bias
    torch.testing.assert_close(mlp(x), expected)
    assert [name for name, _ in GatedMLP(4, 6).named_parameters()] == ["gate_up.weight", "down.weight"]


def test_the_gated_mlp_may_have_a_gelu() -> None:
    mlp = GatedMLP(4, 6, activation="gelu_tanh")
    randomise(mlp)
    x = torch.randn(2, 3, 4)
    gate, up = (x @ mlp.gate_up.weight.T).split(6, dim=-1)
    gate = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(mlp(x), (gate * up) @ mlp.down.weight.T, rtol=1e-5, atol=1e-5)


def test_gelu_mlp_exact_and_approximate() -> None:
    x = torch.randn(2, 3, 4)
    outputs = []
    for approximate in ("none", "tanh"):
        mlp = GELUMLP(4, 6, approximate="none" if approximate == "none" else "tanh")
        randomise(mlp)
        h = x @ mlp.up.weight.T + mlp.up.bias
        exact = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        tanh = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        expected = (exact if approximate == "none" else tanh) @ mlp.down.weight.T + mlp.down.bias
        torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-5)
        outputs.append((exact - tanh).abs().max())
    assert max(outputs) > 1e-6
    assert len(list(GELUMLP(4, 6, bias=False).parameters())) == 2


def test_modulation() -> None:
    h, shift, scale, gate = torch.randn(2, 3, 4), torch.randn(2, 1, 4), torch.randn(2, 1, 4), torch.randn(1, 1, 4)
    cases: list[tuple[Modulation, torch.Tensor, torch.Tensor]] = [
        (Unmodulated(), h, h),
        (ScaleGate(scale=scale, gate=gate), h + h * scale, gate * h),
        (ShiftScaleGate(shift=shift, scale=scale, gate=gate), h + h * scale + shift, gate * h),
    ]
    before_call = h.clone()
    for modulation, before, after in cases:
        torch.testing.assert_close(modulation.before(h), before)
        torch.testing.assert_close(modulation.after(h), after)
    assert torch.equal(h, before_call)
