"""Choosing tokens: what a request asks for, and one chooser per request.

Legend: V vocabulary, n candidates.
"""

import difflib
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from torch import Tensor

from .constraint import Constraint, check_json_schema, check_regex, json_constraint, regex_constraint

if TYPE_CHECKING:
    from .tokenizer import TextTokenizer

_FIRST_HEAD, _HEAD_GROWTH = 256, 16
_LARGEST = torch.finfo(torch.float32).max


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling`, by name; `stop` may also be one string, and both stops may be lists."""

    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    stop_tokens: Sequence[int]
    logprobs: int | None
    json_schema: str | Mapping[str, Any] | None
    regex: str | None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. The logits go through, in this order, that of transformers: `logit_bias` (added; -inf bans
    a token), `repetition_penalty` (over the prompt and what was generated: logits over 0 are divided by it, others
    multiplied; Keskar et al. 2019), bans and the constraint of `json_schema` or `regex`, `temperature`, `top_k` (None:
    all; ties with the last one stay), `top_p` (the fewest tokens that hold this much of the probability; Holtzman et
    al. 2020) and `min_p` (tokens at least this likely relative to the likeliest). Temperature 0 and top_k 1 are greedy:
    the likeliest token.

    A request's draws depend on its own `seed` alone. Generation ends before a string of `stop` (which is not part of
    the text), at a token of `stop_tokens`, or after `max_tokens`. `logprobs` asks for the log-probability of each
    token and of the that many likeliest ones, as the model gives them: before any of the above.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float], hash=False)
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | None = field(default=None, hash=False)
    regex: str | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self._check_stops()
        _check_bias(self.logit_bias)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.json_schema is not None and self.regex is not None:
            raise ValueError(f"json_schema and regex {self.regex!r} are both given; give at most one of them")
        if self.json_schema is not None:
            check_json_schema(self.json_schema)
        if self.regex is not None:
            check_regex(self.regex)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, with no draw."""
        return self.temperature == 0 or self.top_k == 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse what names tokens outside the vocabulary.

        Raises:
            ValueError: an id of `logit_bias` or `stop_tokens` that is not below `vocab_size`, or `logprobs` over it.
        """
        for name, ids in (("logit_bias", tuple(self.logit_bias)), ("stop_tokens", self.stop_tokens)):
            outside = [token for token in ids if token >= vocab_size]
            if outside:
                raise ValueError(f"{name} names token {outside[0]}; ids go from 0 to {vocab_size - 1}")
        if (self.logprobs or 0) > vocab_size:
            raise ValueError(f"logprobs is {self.logprobs}; it must be at most the vocabulary's {vocab_size}")

    def constraint(self, tokenizer: "TextTokenizer") -> Constraint | None:
        """A fresh constraint for one request, or None if the output is free."""
        if self.json_schema is not None:
            return json_constraint(self.json_schema, tokenizer)
        return None if self.regex is None else regex_constraint(self.regex, tokenizer)

    def _check_types(self) -> None:
        whole = (
            ("max_tokens", self.max_tokens),
            ("top_k", 1 if self.top_k is None else self.top_k),
            ("seed", self.seed),
            ("logprobs", 0 if self.logprobs is None else self.logprobs),
        )
        for name, value in whole:
            if type(value) is not int:
                raise ValueError(f"{name} is {value!r}; it must be a whole number")
        numbers = (
            ("temperature", self.temperature),
            ("top_p", self.top_p),
            ("min_p", self.min_p),
            ("repetition_penalty", self.repetition_penalty),
        )
        for name, value in numbers:
            if not _is_number(value):
                raise ValueError(f"{name} is {value!r}; it must be a number")

    def _check_ranges(self) -> None:
        penalty = self.repetition_penalty
        checks = (
            (self.max_tokens >= 1, f"max_tokens is {self.max_tokens}; it must be at least 1"),
            (
                0 <= self.temperature < math.inf,
                f"temperature is {self.temperature}; it must be 0 (the likeliest token) or more",
            ),
            (
                self.top_k is None or self.top_k >= 1,
                f"top_k is {self.top_k}; it must be at least 1, or None for all tokens",
            ),
            (0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be over 0 and at most 1"),
            (0 <= self.min_p <= 1, f"min_p is {self.min_p}; it must be from 0 (all tokens) to 1"),
            (
                0 < penalty < math.inf,
                f"repetition_penalty is {penalty}; it must be over 0 (1: none, over 1: less repetition)",
            ),
            (0 <= self.seed < 2**63, f"seed is {self.seed}; it must be from 0 to 2^63 - 1"),
            (
                (self.logprobs or 0) >= 0,
                f"logprobs is {self.logprobs}; it must be 0 (the chosen token's alone) or more, or None",
            ),
        )
        for holds, message in checks:
            if not holds:
                raise ValueError(message)

    def _check_stops(self) -> None:
        if type(self.stop) is not tuple:
            raise ValueError(f"stop is {self.stop!r}; it must be a tuple of strings")
        for text in self.stop:
            if type(text) is not str or not text:
                raise ValueError(f"stop has {text!r}; each must be a string of at least one character")
        if type(self.stop_tokens) is not tuple:
            raise ValueError(f"stop_tokens is {self.stop_tokens!r}; it must be a tuple of ids")
        for token in self.stop_tokens:
            if type(token) is not int or token < 0:
                raise ValueError(f"stop_tokens has {token!r}; each must be an id, 0 or more")


def sampling_from(options: SamplingOptions) -> Sampling:
    """`Sampling` of options by name.

    Raises:
        ValueError: an unknown name (the message gives the nearest known one), or a value out of range.
    """
    known = [each.name for each in fields(Sampling)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"unknown option {name!r}; {f'did you mean {near[0]!r}?' if near else f'known are {known}'}"
            )
    values: dict[str, Any] = dict(options)
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    for name in ("stop", "stop_tokens"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    return Sampling(**values)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A token; where asked for, its log-probability and those of the likeliest tokens, (id, log-probability), the
    likeliest first. They are the model's: log softmax of the logits before bias, penalty, constraint and temperature.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Chooser:
    """Chooses the tokens of one request, and keeps what that needs: its generator, the tokens seen so far (the prompt's
    count), and the state of its constraint. Tokens of `banned` never come.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: Sequence[int],
        constraint: Constraint | None = None,
        *,
        banned: Collection[int] = (),
    ) -> None:
        self.sampling = sampling
        self._constraint = constraint
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._prompt_ids = list(prompt_ids) if sampling.repetition_penalty != 1 else []
        self._bias = {**sampling.logit_bias, **dict.fromkeys(banned, -math.inf)}
        self._is_plain = not self._bias and sampling.repetition_penalty == 1 and constraint is None
        self._bias_ids, self._bias_values = torch.tensor([]), torch.tensor([])
        self._seen = torch.tensor([])  # [V] bool

    @property
    def is_finished(self) -> bool:
        """Whether the constraint's text is complete and nothing but an end token may follow."""
        return self._constraint is not None and self._constraint.is_finished

    def choose(self, logits: Tensor) -> Choice:
        """The next token, from the logits [V] that follow everything so far.

        Raises:
            ValueError: logits of another shape, ids outside the vocabulary, or nothing that is allowed.
            FloatingPointError: the best logit is not finite.
        """
        if logits.dim() != 1:
            raise ValueError(f"logits have shape {tuple(logits.shape)}; choosing takes those of one token, [V]")
        if self._seen.numel() != len(logits):
            self._prepare(len(logits))
        token = self._token(logits if self._is_plain else self._processed(logits))
        self._seen[token] = True
        if self._constraint is not None:
            self._constraint.accept(token)
        return _choice(token, logits, self.sampling.logprobs)

    def _prepare(self, vocab_size: int) -> None:
        self.sampling.check_vocabulary(vocab_size)
        self._bias_ids = torch.tensor(list(self._bias), dtype=torch.int64)
        self._bias_values = torch.tensor(list(self._bias.values()), dtype=torch.float32)
        self._seen = torch.zeros(vocab_size, dtype=torch.bool)
        self._seen[torch.tensor(self._prompt_ids, dtype=torch.int64)] = True

    def _token(self, scores: Tensor) -> int:
        best, index = scores.max(dim=0)
        value = float(best)
        if value == -math.inf and not self._is_plain:
            raise ValueError("no token is allowed here: bias, banned tokens and constraint exclude every one")
        if not math.isfinite(value):
            raise FloatingPointError(f"the best logit is {value}")
        if self.sampling.is_greedy:
            return int(index)
        return draw(scores.to("cpu", torch.float32), self.sampling, self._generator)

    def _processed(self, logits: Tensor) -> Tensor:
        """Scores [V] float32 on the CPU: bias, then penalty, then constraint."""
        scores, penalty = logits.detach().to("cpu", torch.float32, copy=True), self.sampling.repetition_penalty
        if self._bias:
            scores[self._bias_ids] += self._bias_values
        if penalty != 1:
            penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
            scores = torch.where(self._seen, penalised, scores)
        if self._constraint is not None:
            mask = self._constraint.mask()
            scores[len(mask) :] = -math.inf  # a model may have more rows than its tokenizer has ids
            scores[: len(mask)].masked_fill_(~mask[: len(scores)], -math.inf)
        return scores


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from logits [V], float32 on the CPU, by temperature, top-k, top-p and min-p. Takes one number from the
    generator, unless greedy.
    """
    if sampling.is_greedy:
        return int(logits.argmax())
    point = torch.rand((), generator=generator, dtype=torch.float64)
    ids, probabilities = candidates(logits, sampling, share=float(point))
    place = int(torch.searchsorted(probabilities.cumsum(0), point, right=True))
    return int(ids[min(place, len(ids) - 1)])


def candidates(logits: Tensor, sampling: Sampling, share: float = 1.0) -> tuple[Tensor, Tensor]:
    """The tokens [n] that temperature, top-k, top-p and min-p leave, likeliest first, and their probabilities [n]
    float64. If nothing is cut, only as many as hold `share` of the probability (a sort of a part of the vocabulary).
    """
    top_k, top_p, min_p, vocab_size = sampling.top_k, sampling.top_p, sampling.min_p, len(logits)
    best = logits.max().double()  # taken off, so that no temperature, however small, leads to infinity
    needed = top_p if top_p < 1 else share if min_p == 0 else math.inf
    size = min(top_k or _FIRST_HEAD, vocab_size)
    total = None if top_k else ((logits.double() - best) / sampling.temperature).exp().sum()
    while True:
        values, ids = _head(logits, size)
        weights = ((values.double() - best) / sampling.temperature).exp()
        mass = weights.cumsum(0)
        whole = mass[-1] if total is None else total
        if top_k or len(ids) == vocab_size or mass[-1] >= needed * whole or weights[-1] < min_p:
            break
        size = min(size * _HEAD_GROWTH, vocab_size)
    keep = (weights >= min_p) & (weights > 0)
    if top_p < 1:
        keep &= mass - weights < top_p * whole
    is_cut = top_k is not None or top_p < 1 or min_p > 0
    return ids[keep], weights[keep] / (weights[keep].sum() if is_cut else whole)


def _head(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` largest logits and those equal to the last of them, and their ids, in the order of a stable sort."""
    if size == len(logits):
        values, ids = logits.sort(descending=True, stable=True)
        return values, ids
    edge = logits.topk(size, sorted=False).values.min()
    ids = (logits >= edge).nonzero().squeeze(1)
    values, order = logits[ids].sort(descending=True, stable=True)
    return values, ids[order]


def _choice(token: int, logits: Tensor, logprobs: int | None) -> Choice:
    if logprobs is None:
        return Choice(token_id=token)
    logits = logits.detach().float()
    total = logits.logsumexp(0)
    values, ids = logits.topk(logprobs)
    top = tuple(zip(ids.tolist(), (values - total).tolist(), strict=True))
    return Choice(token_id=token, logprob=float(logits[token] - total), top_logprobs=top)


def _is_number(value: object) -> bool:
    """Whether this is a number that arithmetic in double precision can take."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


def _check_bias(bias: Mapping[int, float]) -> None:
    if not isinstance(cast(object, bias), Mapping):
        raise ValueError(f"logit_bias is {bias!r}; it must be a mapping from tokens' ids to numbers")
    for token, value in bias.items():
        if type(token) is not int or token < 0:
            raise ValueError(f"logit_bias has the key {token!r}; each must be a token's id, 0 or more")
        if not _is_number(value) or not value <= _LARGEST:
            raise ValueError(
                f"logit_bias of token {token} is {value!r}; it must be a finite float32 number, or -inf for never"
            )
