"""A feed-forward layer of many experts, of which each token visits a few (Shazeer et al. 2017).

Legend: T tokens, D width, E experts, K experts per token, h width inside an expert, N = T K visits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from .mlp import Activation, gated
from .ops.row_product import Linear, linear

_MOST_EXPERTS = 4096


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """`count` experts of inner width `hidden`, of which each token visits `active`.

    Their shares are softmax probabilities, which `normalise` makes sum to 1. The layers in `dense_layers` have a plain
    MLP instead.
    """

    count: int
    active: int
    hidden: int
    normalise: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.count:
            raise ValueError(f"{self.active} of {self.count} experts are active; it must be from 1 to all of them")
        if self.count > _MOST_EXPERTS:
            raise ValueError(f"there are {self.count} experts; it must be at most {_MOST_EXPERTS}")
        if self.hidden < 1:
            raise ValueError(f"the experts' hidden width is {self.hidden}; it must be at least 1")

    def is_sparse(self, layer: int) -> bool:
        """Whether layer `layer` has experts."""
        return layer not in self.dense_layers


class Routing:
    """Collects, during one run, how many tokens visited each expert of each layer. Padding counts: it is computed."""

    def __init__(self) -> None:
        self._visits: dict[int, Tensor] = {}

    def record(self, layer: int, chosen: Tensor, count: int) -> None:
        """Add a call: `chosen` [T, K] are the experts of each token, of `count` in all."""
        visits = chosen.flatten().bincount(minlength=count)
        self._visits[layer] = self._visits[layer] + visits if layer in self._visits else visits

    @property
    def visits(self) -> Mapping[int, tuple[int, ...]]:
        """By layer: the number of tokens that visited each expert, [E]."""
        return {layer: tuple(visits.tolist()) for layer, visits in sorted(self._visits.items())}

    @property
    def touched(self) -> Mapping[int, tuple[int, ...]]:
        """By layer: the experts that any token visited, ascending."""
        return {layer: tuple(e for e, n in enumerate(counts) if n) for layer, counts in self.visits.items()}


@dataclass(frozen=True, kw_only=True)
class ExpertCall:
    """Tokens [T, D], the experts each visits and their shares [T, K], and the experts' weights: gate and up
    [E, 2 h, D], gate first, and down [E, D, h].
    """

    tokens: Tensor
    chosen: Tensor
    shares: Tensor
    gate_up: Tensor
    down: Tensor
    activation: Activation


class ExpertBackend(Protocol):
    """One implementation of the experts' products."""

    def __call__(self, call: ExpertCall) -> Tensor:
        """sum over a token's experts of share * down(activation(gate(x)) * up(x)), [T, D]."""
        ...


def experts_one_by_one(call: ExpertCall) -> Tensor:
    """The definition: each touched expert in turn, on the tokens that visit it."""
    out = torch.zeros_like(call.tokens)
    for expert in call.chosen.unique().tolist():
        token, place = (call.chosen == expert).nonzero(as_tuple=True)
        h = gated(linear(call.tokens[token], call.gate_up[expert]), call.activation)
        h = linear(h, call.down[expert]) * call.shares[token, place, None]
        out = out.index_add(0, token, h)
    return out


def experts_grouped(call: ExpertCall) -> Tensor:
    """Visits sorted by expert, so that each touched expert is one product over neighbouring rows, each weight is read
    once, and nothing is added out of order.
    """
    num_tokens, per_token = call.chosen.shape
    experts, order = call.chosen.flatten().sort(stable=True)
    multiply = _by_kernel(experts, len(call.down)) if _has_kernel(call) else _by_segments(experts)
    h = gated(multiply(call.tokens[order // per_token], call.gate_up), call.activation)
    h = multiply(h, call.down)
    h = torch.empty_like(h).index_copy(0, order, h)
    return torch.bmm(call.shares[:, None], h.view(num_tokens, per_token, -1))[:, 0]


def _by_segments(experts: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A product of rows [N, in] and weights [E, out, in], row n with the matrix `experts[n]` (ascending): [N, out]."""
    touched, counts = (each.tolist() for each in experts.unique_consecutive(return_counts=True))

    def multiply(rows: Tensor, weights: Tensor) -> Tensor:
        parts = zip(rows.split(counts), touched, strict=True)
        return torch.cat([linear(part, weights[expert]) for part, expert in parts])

    return multiply


def _by_kernel(experts: Tensor, count: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The same by torch's grouped kernel, without waiting for the device to tell the counts."""
    ends = experts.bincount(minlength=count).cumsum(0).to(torch.int32)
    return lambda rows, weights: functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def _has_kernel(call: ExpertCall) -> bool:
    return call.tokens.is_cuda and call.tokens.dtype == torch.bfloat16 and len(call.tokens) > 1


class MixtureOfExperts(nn.Module):
    """Router and experts. The experts' matrices are stacked in rows, `gate_up` [E 2 h, D] and `down` [E D, h], so that
    files with a tensor per expert and files with one stack both fill them by joining rows.
    """

    def __init__(
        self,
        width: int,
        config: ExpertsConfig,
        *,
        activation: Activation = "silu",
        backend: ExpertBackend = experts_grouped,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation: Activation = activation
        self.backend = backend
        self.router = Linear(width, config.count, bias=False)
        self.gate_up = nn.Parameter(torch.zeros(config.count * 2 * config.hidden, width))
        self.down = nn.Parameter(torch.zeros(config.count * width, config.hidden))

    def forward(self, x: Tensor, routing: Routing | None = None, layer: int = 0) -> Tensor:
        """[..., D] to [..., D]; `routing` is told which experts were visited in `layer`."""
        tokens = x.reshape(-1, x.shape[-1])
        chosen, shares = self.route(tokens)
        if routing is not None:
            routing.record(layer, chosen, self.config.count)
        call = ExpertCall(
            tokens=tokens,
            chosen=chosen,
            shares=shares,
            gate_up=self.gate_up.view(self.config.count, -1, x.shape[-1]),
            down=self.down.view(self.config.count, x.shape[-1], -1),
            activation=self.activation,
        )
        return self.backend(call).view(x.shape)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of tokens [T, D], most likely first, and their shares: [T, K] int64 and [T, K] like `tokens`."""
        probabilities = self.router(tokens).softmax(-1, dtype=torch.float32)
        shares, chosen = probabilities.topk(self.config.active, dim=-1)
        if self.config.normalise:
            shares = shares / shares.sum(-1, keepdim=True)
        return chosen, shares.to(tokens.dtype)
