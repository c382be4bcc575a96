"""Token by token: sampling, and the prefill / decode loop over a key/value cache.

Legend: B rows (1 here), L tokens, V vocabulary.
"""

import difflib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypedDict

import torch
from torch import Tensor

from ..core.kv_cache import ContiguousKVCache
from .model import LanguageModel


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling`, by name."""

    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Temperature 0 takes the likeliest; else softmax(logits / temperature) over the `top_k`
    likeliest tokens (None: all), and of these the fewest that hold `top_p` of the probability (Holtzman et al. 2020).
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("max_tokens", self.max_tokens), ("top_k", self.top_k or 1), ("seed", self.seed)):
            if type(value) is not int:
                raise ValueError(f"{name} is {value!r}; it must be a whole number")
        for name, value in (("temperature", self.temperature), ("top_p", self.top_p)):
            if type(value) not in (int, float):
                raise ValueError(f"{name} is {value!r}; it must be a number")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (the likeliest token) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1, or None for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be over 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to 2^63 - 1")


def sampling_from(options: SamplingOptions) -> Sampling:
    """`Sampling` of options by name.

    Raises:
        ValueError: an unknown name; the message gives the nearest known one.
    """
    known = [field.name for field in fields(Sampling)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"unknown option {name!r}; {f'did you mean {near[0]!r}?' if near else f'known are {known}'}"
            )
    return Sampling(**options)


@torch.no_grad()
def generate_ids(
    model: LanguageModel,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    stop: Collection[int],
    banned: Collection[int] = (),
) -> Iterator[int]:
    """The tokens that follow `prompt`, each as soon as it is drawn: up to `max_tokens`, to a token of `stop` (given as
    the last one), or until the context is full. `banned` tokens never come. The prompt runs in one pass, then each
    token in one of its own.

    Raises:
        ValueError: an empty prompt, or one that leaves no room in the context.
        FloatingPointError: logits that are not finite.
    """
    num_prompt, context = len(prompt), model.config.context_length
    if not prompt:
        raise ValueError("the prompt has no tokens; it needs at least one")
    if num_prompt >= context:
        raise ValueError(
            f"the prompt has {num_prompt} tokens; at most {context - 1} leave room in the context of {context}"
        )
    room = min(sampling.max_tokens, context - num_prompt)
    generator = torch.Generator().manual_seed(sampling.seed)
    cache, new = _cache(model, num_prompt + room), list(prompt)
    for index in range(room):
        ids = torch.tensor([new], device=model.embedding.weight.device)
        logits = model.logits(ids, cache=cache)[0, -1].float().cpu()
        if not bool(logits.isfinite().all()):
            raise FloatingPointError(f"language model: the logits of token {index} are not finite")
        logits[list(banned)] = -math.inf
        token = draw(logits, sampling, generator)
        yield token
        if token in stop:
            return
        new = [token]


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from logits [V], float32 on the CPU."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits, order = logits.sort(descending=True, stable=True)
    logits = logits.double() - logits[0]  # so that no temperature, however small, leads to infinity
    probabilities = (logits / sampling.temperature).softmax(0)
    if sampling.top_k is not None:
        probabilities[sampling.top_k :] = 0
    before = probabilities.cumsum(0) - probabilities
    probabilities[before >= sampling.top_p * probabilities.sum()] = 0
    edges = probabilities.cumsum(0)
    point = torch.rand((), generator=generator, dtype=torch.float64) * edges[-1]
    last = int(probabilities.count_nonzero()) - 1
    return int(order[min(int(torch.searchsorted(edges, point, right=True)), last)])


def _cache(model: LanguageModel, capacity: int) -> ContiguousKVCache:
    config, weight = model.config, model.embedding.weight
    return ContiguousKVCache(
        layers=config.layers,
        batch=1,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        capacity=capacity,
        dtype=weight.dtype,
        device=weight.device,
    )
