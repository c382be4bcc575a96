"""Experts: the definition in loops, the grouped products against it, and what routing tells."""

import pytest
import torch
from torch import Tensor

from calotype.core import moe
from calotype.core.mlp import Activation
from calotype.core.moe import (
    ExpertCall,
    ExpertsConfig,
    MixtureOfExperts,
    Routing,
    experts_grouped,
    experts_one_by_one,
)

WIDTH, HIDDEN, COUNT = 16, 8, 7


def make_call(num_tokens: int, active: int, *, activation: Activation = "silu", experts: int = COUNT) -> ExpertCall:
    """Random tokens that visit the first `experts` experts only."""
    generator = torch.Generator().manual_seed(num_tokens)
    order = torch.rand(num_tokens, experts, generator=generator).argsort(-1)
    return ExpertCall(
        tokens=torch.randn(num_tokens, WIDTH, generator=generator),
        chosen=order[:, :active],
        shares=torch.rand(num_tokens, active, generator=generator),
        gate_up=torch.randn(COUNT, 2 * HIDDEN, WIDTH, generator=generator),
        down=torch.randn(COUNT, WIDTH, HIDDEN, generator=generator),
        activation=activation,
    )


def token_by_token(call: ExpertCall) -> Tensor:
    out = torch.zeros_like(call.tokens)
    for n, x in enumerate(call.tokens):
        for expert, share in zip(call.chosen[n].tolist(), call.shares[n], strict=True):
            gate, up = (call.gate_up[expert] @ x).split(HIDDEN)
            gate = gate * torch.sigmoid(gate) if call.activation == "silu" else gate * _gelu_share(gate)
            out[n] += share * (call.down[expert] @ (gate * up))
    return out


def _gelu_share(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


CASES = [(1, 3), (1, 1), (5, 2), (40, 7), (6, 1)]


@pytest.mark.parametrize(("num_tokens", "active"), CASES)
def test_one_by_one_is_the_definition(num_tokens: int, active: int) -> None:
    activations: list[Activation] = ["silu", "gelu_tanh"]
    for activation in activations:
        call = make_call(num_tokens, active, activation=activation)
        torch.testing.assert_close(experts_one_by_one(call), token_by_token(call), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_tokens", "active"), CASES)
def test_grouped_equals_one_by_one(num_tokens: int, active: int) -> None:
    call = make_call(num_tokens, active)
    torch.testing.assert_close(experts_grouped(call), experts_one_by_one(call), rtol=1e-4, atol=1e-4)


def test_grouped_by_the_kernel_equals_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "_has_kernel", lambda call: True)
    for num_tokens, active in ((5, 2), (40, 7)):
        call = make_call(num_tokens, active, experts=max(active, 4))
        torch.testing.assert_close(experts_grouped(call), experts_one_by_one(call), rtol=1e-4, atol=1e-4)


def test_the_kernel_is_for_cuda() -> None:
    assert not moe._has_kernel(make_call(5, 2))


def test_only_touched_experts_are_read() -> None:
    call = make_call(9, 2, experts=3)
    for weights in (call.gate_up, call.down):
        weights[3:] = torch.nan
    for backend in (experts_one_by_one, experts_grouped):
        assert bool(backend(call).isfinite().all())


def test_a_token_gets_the_same_whoever_is_beside_it() -> None:
    call = make_call(12, 3)
    together = experts_grouped(call)
    for n in range(12):
        alone = ExpertCall(
            tokens=call.tokens[n : n + 1],
            chosen=call.chosen[n : n + 1],
            shares=call.shares[n : n + 1],
            gate_up=call.gate_up,
            down=call.down,
            activation=call.activation,
        )
        torch.testing.assert_close(experts_grouped(alone)[0], together[n], rtol=1e-4, atol=1e-4)


def make_layer(*, normalise: bool = True) -> MixtureOfExperts:
    config = ExpertsConfig(count=COUNT, active=3, hidden=HIDDEN, normalise=normalise)
    layer = MixtureOfExperts(WIDTH, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


@pytest.mark.parametrize("normalise", [True, False])
@torch.no_grad()
def test_the_likeliest_experts_are_visited(normalise: bool) -> None:
    layer, tokens = make_layer(normalise=normalise), torch.randn(20, WIDTH)
    chosen, shares = layer.route(tokens)
    probabilities = torch.exp(tokens @ layer.router.weight.T)
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    for n in range(20):
        best = sorted(range(COUNT), key=lambda expert: -float(probabilities[n, expert]))[:3]
        assert chosen[n].tolist() == best
        expected = probabilities[n, best]
        torch.testing.assert_close(shares[n], expected / expected.sum() if normalise else expected)


def test_shares_are_computed_in_float32() -> None:
    layer, tokens = make_layer().bfloat16(), torch.randn(4, WIDTH).bfloat16()
    chosen, shares = layer.route(tokens)
    exact = layer.router(tokens).float().softmax(-1).gather(-1, chosen)
    assert shares.dtype == torch.bfloat16
    assert torch.equal(shares, (exact / exact.sum(-1, keepdim=True)).bfloat16())


@torch.no_grad()
def test_the_layer_keeps_its_shape_and_routing_counts() -> None:
    layer, routing, x = make_layer(), Routing(), torch.randn(2, 5, WIDTH)
    out = layer(x, routing, 4)
    assert out.shape == x.shape
    layer(x[:, :1], routing, 4)
    layer(x, routing, 1)
    assert torch.equal(layer(x), out)
    chosen = layer.route(x.flatten(0, 1))[0].flatten().tolist()
    more = layer.route(x[:, 0])[0].flatten().tolist()
    assert list(routing.visits) == [1, 4]
    assert routing.visits[1] == tuple(chosen.count(expert) for expert in range(COUNT))
    assert routing.visits[4] == tuple((chosen + more).count(expert) for expert in range(COUNT))
    assert routing.touched[1] == tuple(sorted(set(chosen)))


def test_every_parameter_gets_a_gradient() -> None:
    layer = make_layer()
    layer(torch.randn(30, WIDTH)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


def test_impossible_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="5 of 4 experts are active"):
        ExpertsConfig(count=4, active=5, hidden=8)
    with pytest.raises(ValueError, match="0 of 4 experts are active"):
        ExpertsConfig(count=4, active=0, hidden=8)
    with pytest.raises(ValueError, match="there are 1000000000 experts; it must be at most 4096"):
        ExpertsConfig(count=10**9, active=2, hidden=8)
    with pytest.raises(ValueError, match="hidden width is 0"):
        ExpertsConfig(count=4, active=2, hidden=0)


def test_some_layers_may_be_dense() -> None:
    config = ExpertsConfig(count=4, active=2, hidden=8, dense_layers=(0, 2))
    assert [config.is_sparse(i) for i in range(4)] == [False, True, False, True]
