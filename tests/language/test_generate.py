"""The prefill / decode loop of one sequence."""

import gc
import math
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from calotype.core.kv_cache import ContiguousKVCache, KVCache, LayeredKVCache, RingKVCache
from calotype.core.moe import Routing
from calotype.language.generate import cache_for, generate_ids, generate_tokens, prefill, rows_are_finite
from calotype.language.model import LanguageModel, LanguageModelConfig
from calotype.language.sampling import Chooser, Sampling


@dataclass(frozen=True, kw_only=True)
class Likeliest:
    token_id: int


class Greedy:
    def choose(self, logits: Tensor) -> Likeliest:
        assert logits.dim() == 1
        return Likeliest(token_id=int(logits.argmax()))


def _generate(model: LanguageModel, prompt: list[int], sampling: Sampling, banned: tuple[int, ...] = ()) -> list[int]:
    return list(generate_ids(model, prompt, sampling, stop=(), banned=banned))


def _greedy(
    model: LanguageModel, prompt: list[int], num: int, chunk: int = 512, cache: KVCache | None = None
) -> list[int]:
    tokens = generate_tokens(model, prompt, Greedy(), max_tokens=num, chunk=chunk, cache=cache)
    return [chosen.token_id for chosen in tokens]


@pytest.fixture
def sliding_model() -> LanguageModel:
    """Layers 0 and 2 see 6 tokens, layer 1 all."""
    torch.manual_seed(0)
    config = LanguageModelConfig(
        vocab_size=300,
        width=16,
        layers=3,
        heads=2,
        kv_heads=1,
        head_width=8,
        hidden=16,
        context_length=60,
        window=6,
        sliding=(True, False, True),
    )
    model = LanguageModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model


def _by_whole_passes(model: LanguageModel, ids: list[int], num: int) -> list[int]:
    ids, start = list(ids), len(ids)
    for _ in range(num):
        ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids[start:]


def test_greedy_tokens_are_those_of_whole_passes(language_model: LanguageModel) -> None:
    expected = _by_whole_passes(language_model, [5, 9, 700], 8)
    assert _generate(language_model, [5, 9, 700], Sampling(max_tokens=8)) == expected
    assert _generate(language_model, [5, 9, 700], Sampling(max_tokens=8, seed=3)) == expected
    assert _greedy(language_model, [5, 9, 700], 8) == expected


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
def test_the_prompt_may_be_read_in_chunks(
    language_model: LanguageModel, sliding_model: LanguageModel, chunk: int
) -> None:
    prompt = [5, 9, 200, 3, 3, 8, 100, 7, 250]
    for model in (language_model, sliding_model):
        assert _greedy(model, prompt, 20, chunk) == _by_whole_passes(model, prompt, 20)


def test_layers_get_the_cache_they_need(language_model: LanguageModel, sliding_model: LanguageModel) -> None:
    token = 2 * 8 * 4
    cache = cache_for(sliding_model, 50, batch=2, chunk=4)
    assert isinstance(cache, LayeredKVCache)
    assert cache.bytes == 2 * (50 + 2 * (5 + 4)) * token
    assert cache_for(sliding_model, 6, chunk=4).bytes == 3 * 6 * token
    assert cache_for(language_model, 10).bytes == 3 * 10 * 2 * token


@pytest.mark.parametrize("kind", ["layered", "contiguous", "ring"])
def test_a_given_cache_is_continued(sliding_model: LanguageModel, kind: str) -> None:
    caches: dict[str, KVCache] = {
        "layered": cache_for(sliding_model, 40, chunk=4),
        "contiguous": ContiguousKVCache(layers=3, batch=1, kv_heads=1, head_width=8, capacity=40),
        "ring": RingKVCache(layers=3, batch=1, kv_heads=1, head_width=8, window=40),
    }
    cache, text = caches[kind], [5, 9, 200, 3, 3, 8, 100]
    for prompt in ([*text], [1, 2, 3]):
        text += prompt if text != prompt else []
        tokens = _greedy(sliding_model, prompt, 5, 4, cache)
        assert tokens == _by_whole_passes(sliding_model, text, 5)
        assert int(cache.lengths[0]) == len(text) + 4
        text += tokens[:-1]


def test_prefill_gives_the_logits_of_the_last_token(language_model: LanguageModel) -> None:
    cache = cache_for(language_model, 9)
    logits = prefill(language_model, [4, 5, 6, 7, 8], cache, chunk=2)
    expected = language_model.logits(torch.tensor([[4, 5, 6, 7, 8]]))[0, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert cache.lengths.tolist() == [5]
    assert not logits.requires_grad


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
        generate_ids(language_model, [4] * 40, Sampling(), stop=())  # refused before any token is asked for
    cache = cache_for(language_model, 40)
    assert len(_greedy(language_model, [4] * 30, 5, cache=cache)) == 5
    with pytest.raises(ValueError, match="6 tokens; at most 5 leave room in the context of 40 after the 34 tokens"):
        _greedy(language_model, [4] * 6, 1, cache=cache)


def test_bad_arguments_are_refused_at_once(language_model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        generate_tokens(language_model, [], Greedy(), max_tokens=1)
    with pytest.raises(ValueError, match="max_tokens is 0; it must be at least 1"):
        generate_tokens(language_model, [4], Greedy(), max_tokens=0)
    with pytest.raises(ValueError, match="chunk is 0; it must be at least 1"):
        generate_tokens(language_model, [4], Greedy(), max_tokens=1, chunk=0)
    with pytest.raises(ValueError, match="the cache has 2 rows; one sequence needs a cache of 1"):
        generate_tokens(language_model, [4], Greedy(), max_tokens=1, cache=cache_for(language_model, 9, batch=2))


def test_logits_that_are_not_finite_are_named(language_model: LanguageModel) -> None:
    with torch.no_grad():
        language_model.norm.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="the logits of token 0 are not finite"):
        _generate(language_model, [4], Sampling())
    assert rows_are_finite(torch.full((2, 9), 3e38)) == [True, True]  # a sum that overflows is no reason
    for value in (math.inf, -math.inf, math.nan):
        assert rows_are_finite(torch.tensor([[1.0, 2.0], [1.0, value]])) == [True, False]


def test_a_closed_generator_holds_nothing(language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[ContiguousKVCache]] = []
    init = ContiguousKVCache.__init__

    def remember(self: ContiguousKVCache, **sizes: int) -> None:
        made.append(weakref.ref(self))
        init(self, **sizes)

    monkeypatch.setattr(ContiguousKVCache, "__init__", remember)
    tokens = generate_tokens(language_model, [4, 5], Greedy(), max_tokens=9)
    next(tokens)
    assert made[0]() is not None
    tokens.close()  # pyright: ignore[reportAttributeAccessIssue]
    gc.collect()
    assert made[0]() is None


def test_the_callers_gradient_mode_stays(language_model: LanguageModel) -> None:
    tokens = generate_tokens(language_model, [4], Greedy(), max_tokens=3)
    next(tokens)
    assert torch.is_grad_enabled()


def test_experts_are_recorded() -> None:
    from calotype.core.moe import ExpertsConfig

    config = LanguageModelConfig(
        vocab_size=50,
        width=8,
        layers=1,
        heads=1,
        kv_heads=1,
        head_width=8,
        hidden=8,
        experts=ExpertsConfig(count=3, active=2, hidden=4),
    )
    model, routing = LanguageModel(config), Routing()
    chooser = Chooser(Sampling(), [1, 2, 3])
    assert len(list(generate_tokens(model, [1, 2, 3], chooser, max_tokens=4, routing=routing))) == 4
    assert sum(routing.visits[0]) == 2 * (3 + 3)
