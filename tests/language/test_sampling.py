"""What a request may ask for, and the choice of tokens, against transformers' own processors."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from calotype.language.sampling import Chooser, Sampling, candidates, draw, sampling_from

VOCAB = 5000


def _logits(seed: int, vocab: int = VOCAB) -> Tensor:
    return 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def _expected(sampling: Sampling, logits: Tensor, ids: list[int]) -> Tensor:
    """Probabilities [V] by transformers' processors, in the order in which `generate` makes the list."""
    processors: list[Any] = []
    if sampling.logit_bias:
        bias = {(token,): float(value) for token, value in sampling.logit_bias.items()}
        processors.append(SequenceBiasLogitsProcessor(sequence_bias=bias))
    processors += [
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        TemperatureLogitsWarper(sampling.temperature),
        TopKLogitsWarper(sampling.top_k or len(logits)),
        TopPLogitsWarper(sampling.top_p),
        MinPLogitsWarper(sampling.min_p),
    ]
    scores = LogitsProcessorList(processors)(torch.tensor([ids]), logits[None].clone())
    return scores[0].double().softmax(0)


class _Spy(Chooser):
    """Shows the distribution that a chooser draws from."""

    def probabilities(self, logits: Tensor) -> Tensor:
        self._prepare(len(logits))
        ids, shares = candidates(self._processed(logits), self.sampling)
        return torch.zeros(len(logits), dtype=torch.float64).index_put_((ids,), shares)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 40},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 2.5, "top_p": 0.97},  # more candidates than the first part of the sort
        {"temperature": 1.1, "min_p": 0.05},
        {"temperature": 3.0, "min_p": 0.01},
        {"temperature": 1.2, "top_k": 300, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.0, "repetition_penalty": 1.7, "top_k": 50},
        {"temperature": 1.0, "repetition_penalty": 0.6, "logit_bias": {3: 4.5, 9: -2.0, 11: 12.0}, "top_p": 0.9},
    ],
)
def test_distributions_are_those_of_transformers(options: dict[str, Any]) -> None:
    sampling = Sampling(**options)
    for seed in range(3):
        logits, ids = _logits(seed), [3, 11, 3, 40 + seed]
        expected = _expected(sampling, logits, ids)
        found = _Spy(sampling, ids).probabilities(logits)
        assert torch.equal(found > 0, expected > 0)
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-9)


def test_ties_with_the_last_of_top_k_stay() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0])
    sampling = Sampling(temperature=1.0, top_k=2)
    assert torch.allclose(_Spy(sampling, [0]).probabilities(logits), _expected(sampling, logits, [0]), atol=1e-7)
    assert candidates(logits, sampling)[0].tolist() == [1, 0, 2, 4]


def test_a_part_of_the_sort_draws_as_the_whole() -> None:
    logits = _logits(0).round(decimals=1)  # many ties
    sampling = Sampling(temperature=1.5)
    order = logits.sort(descending=True, stable=True).indices
    edges = (logits[order].double() / 1.5).softmax(0).cumsum(0)
    for seed in range(200):
        point = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        drawn = draw(logits, sampling, torch.Generator().manual_seed(seed))
        assert drawn == int(order[torch.searchsorted(edges, point, right=True)])


def test_the_penalty_counts_prompt_and_generated_tokens_once() -> None:
    sampling = Sampling(repetition_penalty=2.0)
    chooser = Chooser(sampling, [0, 0])
    logits = torch.tensor([4.0, 3.0, 2.5, -1.0])
    assert [chooser.choose(logits).token_id for _ in range(3)] == [1, 2, 0]
    assert torch.equal(logits, torch.tensor([4.0, 3.0, 2.5, -1.0]))


def test_temperature_0_and_top_k_1_are_greedy() -> None:
    for seed in range(3):
        logits = _logits(seed)
        best = int(logits.argmax())
        assert Chooser(Sampling(), []).choose(logits).token_id == best
        assert Chooser(Sampling(temperature=5.0, top_k=1, seed=seed), []).choose(logits).token_id == best
        assert Chooser(Sampling(), []).choose(logits.bfloat16()).token_id == int(logits.bfloat16().argmax())
    assert draw(_logits(0), Sampling(top_k=1, temperature=2.0), torch.Generator()) == int(_logits(0).argmax())


def test_a_request_draws_by_its_own_seed() -> None:
    steps = [_logits(seed, 50) for seed in range(20)]

    def chooser(seed: int) -> Chooser:
        return Chooser(Sampling(temperature=1.0, seed=seed), [])

    first, second = chooser(1), chooser(2)
    together = [(first.choose(logits).token_id, second.choose(logits).token_id) for logits in steps]
    alone = chooser(1)
    torch.manual_seed(123)
    assert [alone.choose(logits).token_id for logits in steps] == [token for token, _ in together]
    assert [token for token, _ in together] != [token for _, token in together]


def test_bias_and_bans() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    assert Chooser(Sampling(logit_bias={3: 5.0}), []).choose(logits).token_id == 3
    assert Chooser(Sampling(logit_bias={0: -math.inf}), [], banned=(1,)).choose(logits).token_id == 2
    with pytest.raises(ValueError, match="no token is allowed here"):
        Chooser(Sampling(), [], banned=range(4)).choose(logits)


def test_log_probabilities_are_the_models_own() -> None:
    logits = _logits(0, 30)
    sampling = Sampling(temperature=0.3, top_k=5, logit_bias={7: 50.0}, logprobs=4)
    choice = Chooser(sampling, [1]).choose(logits)
    expected = logits.log_softmax(0)
    assert choice.token_id == 7
    assert choice.logprob == pytest.approx(float(expected[7]), abs=1e-5)
    values, ids = expected.topk(4)
    assert [token for token, _ in choice.top_logprobs] == ids.tolist()
    assert [value for _, value in choice.top_logprobs] == pytest.approx(values.tolist(), abs=1e-5)
    alone = Chooser(Sampling(logprobs=0), []).choose(logits)
    assert alone.top_logprobs == () and alone.logprob == pytest.approx(float(expected.max()), abs=1e-5)
    assert Chooser(Sampling(), []).choose(logits).logprob is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    logits = torch.tensor([0.0, value, 1.0])
    for sampling in (Sampling(), Sampling(temperature=1.0), Sampling(logit_bias={0: 1.0})):
        with pytest.raises(FloatingPointError, match=r"the best logit is (nan|inf)"):
            Chooser(sampling, []).choose(logits)
    with pytest.raises(FloatingPointError, match="the best logit is -inf"):
        Chooser(Sampling(), []).choose(torch.full((3,), -math.inf))
    with pytest.raises(ValueError, match=r"logits have shape \(1, 3\)"):
        Chooser(Sampling(), []).choose(logits[None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0; it must be a whole number"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be 0"),
        ({"temperature": "1"}, "temperature is '1'; it must be a number"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
        ({"top_p": 0}, "top_p is 0; it must be over 0 and at most 1"),
        ({"min_p": 1.5}, "min_p is 1.5; it must be from 0"),
        ({"min_p": -0.5}, "min_p is -0.5; it must be from 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be over 0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias has the key -1"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias has the key 'a'"),
        ({"logit_bias": {4: math.nan}}, "logit_bias of token 4 is nan"),
        ({"logit_bias": {4: math.inf}}, "logit_bias of token 4 is inf"),
        ({"seed": -1}, "seed is -1; it must be from 0 to"),
        ({"stop": ""}, "stop has ''; each must be a string of at least one character"),
        ({"stop": ["a", ""]}, "stop has ''"),
        ({"stop": 3}, "stop is 3; it must be a tuple of strings"),
        ({"stop_tokens": [-2]}, "stop_tokens has -2"),
        ({"stop_tokens": 5}, "stop_tokens is 5; it must be a tuple of ids"),
        ({"logprobs": -1}, "logprobs is -1; it must be 0"),
        ({"json_schema": "{"}, "json_schema '{' is not JSON"),
        ({"json_schema": "5"}, "json_schema is '5'; it must be a JSON object"),
        ({"json_schema": {"type": "strin"}}, "not a JSON schema that can be enforced: Invalid type: strin"),
        ({"json_schema": {"type": {1}}}, "it must be JSON data"),
        ({"regex": "[a"}, r"regex '\[a' does not compile.*unclosed character class"),
        ({"regex": ""}, "regex is ''; it must be a pattern"),
        ({"regex": "a", "json_schema": {}}, "json_schema and regex 'a' are both given"),
        ({"top_k": ""}, "top_k is ''; it must be a whole number"),
        ({"temperature": 10**400}, "temperature is 1000.*; it must be a number"),
        ({"logprobs": 0.0}, "logprobs is 0.0; it must be a whole number"),
        ({"logit_bias": None}, "logit_bias is None; it must be a mapping"),
        ({"logit_bias": [4]}, r"logit_bias is \[4\]; it must be a mapping"),
        ({"logit_bias": {4: 1e300}}, r"logit_bias of token 4 is 1e\+300"),
        ({"logit_bias": {4: 10**400}}, "logit_bias of token 4 is 1000"),
        ({"json_schema": [("type", "string")]}, "it must be a mapping, or the text of a JSON object"),
        ({"json_schema": {"minimum": math.nan}}, "it must be JSON data"),
        ({"json_schema": "[" * 100_000}, "is not JSON"),
        ({"json_schema": {"const": "\ud800"}}, "not a JSON schema that can be enforced: "),
        ({"regex": "\ud800"}, r"regex is '\\ud800'; it must be a pattern of at least one whole character"),
        ({"tempratur": 1.0}, "unknown option 'tempratur'; did you mean 'temperature'"),
        ({"zzz": 1.0}, "unknown option 'zzz'; known are"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampling_from(options)  # pyright: ignore[reportArgumentType]


def test_ids_outside_the_vocabulary_are_refused() -> None:
    logits = torch.zeros(10)
    with pytest.raises(ValueError, match="logit_bias names token 10; ids go from 0 to 9"):
        Chooser(Sampling(logit_bias={10: 1.0}), []).choose(logits)
    with pytest.raises(ValueError, match="stop_tokens names token 12; ids go from 0 to 9"):
        Sampling(stop_tokens=(12,)).check_vocabulary(10)
    with pytest.raises(ValueError, match="logprobs is 11; it must be at most the vocabulary's 10"):
        Sampling(logprobs=11).check_vocabulary(10)


def test_options_are_plain_data() -> None:
    bias = {1: 2.0}
    sampling = sampling_from({"stop": "a", "stop_tokens": [3], "logit_bias": bias, "json_schema": {"type": "null"}})
    bias[2] = 1.0
    assert (sampling.stop, sampling.stop_tokens, sampling.logit_bias) == (("a",), (3,), {1: 2.0})
    assert hash(sampling) == hash(sampling_from({"stop": ("a",), "stop_tokens": (3,)}))
