"""Sampling and the decode loop."""

import math

import pytest
import torch

from calotype.language.generate import Sampling, draw, generate_ids, sampling_from
from calotype.language.model import LanguageModel


def _generate(model: LanguageModel, prompt: list[int], sampling: Sampling, banned: tuple[int, ...] = ()) -> list[int]:
    return list(generate_ids(model, prompt, sampling, stop=(), banned=banned))


def test_greedy_tokens_are_those_of_whole_passes(language_model: LanguageModel) -> None:
    ids = [5, 9, 700]
    tokens = _generate(language_model, ids, Sampling(max_tokens=8))
    for token in tokens:
        assert token == int(language_model.logits(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)
    assert len(tokens) == 8
    assert tokens == _generate(language_model, [5, 9, 700], Sampling(max_tokens=8, seed=3))


def test_a_seed_fixes_the_draws(language_model: LanguageModel) -> None:
    def tokens(seed: int) -> list[int]:
        return _generate(language_model, [4], Sampling(max_tokens=10, temperature=1.0, seed=seed))

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_it_ends_at_a_stop_token(language_model: LanguageModel) -> None:
    free = _generate(language_model, [4], Sampling(max_tokens=10))
    stopped = list(generate_ids(language_model, [4], Sampling(max_tokens=10), stop=(free[3],)))
    assert stopped == free[: free.index(free[3]) + 1]


def test_banned_tokens_never_come(language_model: LanguageModel) -> None:
    first = _generate(language_model, [4], Sampling(max_tokens=1))[0]
    assert _generate(language_model, [4], Sampling(max_tokens=1), banned=(first,))[0] != first


def test_it_ends_where_the_context_does(language_model: LanguageModel) -> None:
    assert len(_generate(language_model, [4] * 38, Sampling(max_tokens=100))) == 2
    with pytest.raises(ValueError, match="the prompt has 40 tokens; at most 39 leave room in the context of 40"):
        _generate(language_model, [4] * 40, Sampling())
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        _generate(language_model, [], Sampling())


def test_logits_that_are_not_finite_are_named(language_model: LanguageModel) -> None:
    with torch.no_grad():
        language_model.norm.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="the logits of token 0 are not finite"):
        _generate(language_model, [4], Sampling())


def _drawn(sampling: Sampling, count: int = 1500) -> torch.Tensor:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([draw(logits, sampling, generator) for _ in range(count)])
    return torch.bincount(draws, minlength=4) / count


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (Sampling(temperature=1.0, top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(temperature=1.0, top_k=9), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(temperature=1.0, top_p=0.6), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(temperature=1.0, top_p=0.8), [0, 4 / 9, 2 / 9, 3 / 9]),
        (Sampling(temperature=1.0, top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(temperature=1.0, top_p=1e-9), [0, 1, 0, 0]),
    ],
)
def test_draws_follow_the_distribution(sampling: Sampling, expected: list[float]) -> None:
    frequencies = _drawn(sampling)
    assert torch.allclose(frequencies, torch.tensor(expected, dtype=torch.float32), atol=0.045)
    assert not frequencies[torch.tensor(expected) == 0].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 0}, "top_k is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"temprature": 1.0}, "unknown option 'temprature'; did you mean 'temperature'"),
        ({"zzz": 1.0}, "unknown option 'zzz'; known are"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampling_from(options)  # pyright: ignore[reportArgumentType]
