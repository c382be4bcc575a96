"""The language model against written-out formulas."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from calotype.core.kv_cache import ContiguousKVCache
from calotype.core.moe import ExpertsConfig, MixtureOfExperts
from calotype.core.ops import row_product
from calotype.language.model import LanguageModel, LanguageModelConfig


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _rotate(x: Tensor, theta: float) -> Tensor:
    """[B, H, L, Dh], pairs (n, n + Dh / 2)."""
    width = x.shape[-1]
    turned = torch.empty_like(x)
    for position in range(x.shape[2]):
        for n in range(width // 2):
            angle = torch.tensor(position / theta ** (2 * n / width))
            first, second = x[:, :, position, n], x[:, :, position, n + width // 2]
            turned[:, :, position, n] = first * angle.cos() - second * angle.sin()
            turned[:, :, position, n + width // 2] = second * angle.cos() + first * angle.sin()
    return turned


def _reference_states(model: LanguageModel, ids: Tensor, layer: int) -> Tensor:
    """The states after `layer` blocks, written out over the state dictionary."""
    config, w = model.config, model.state_dict()
    batch, length = ids.shape
    x = w["embedding.weight"][ids]
    q_width, kv_width = config.heads * config.head_width, config.kv_heads * config.head_width
    for i in range(layer):
        b = f"blocks.{i}."
        h = _norm(x, w[b + "attention_norm.weight"]) @ w[b + "attention.qkv.weight"].T
        q = h[..., :q_width].view(batch, length, config.heads, -1).transpose(1, 2)
        k = h[..., q_width : q_width + kv_width].view(batch, length, config.kv_heads, -1).transpose(1, 2)
        v = h[..., q_width + kv_width :].view(batch, length, config.kv_heads, -1).transpose(1, 2)
        q = _rotate(_norm(q, w[b + "attention.query_norm.weight"]), config.rope_theta)
        k = _rotate(_norm(k, w[b + "attention.key_norm.weight"]), config.rope_theta)
        groups = config.heads // config.kv_heads
        out = torch.zeros_like(q)
        for head in range(config.heads):
            scores = q[:, head] @ k[:, head // groups].transpose(-1, -2) / config.head_width**0.5
            scores = scores + torch.full((length, length), -torch.inf).triu(1)
            out[:, head] = scores.softmax(-1) @ v[:, head // groups]
        x = x + out.transpose(1, 2).reshape(batch, length, -1) @ w[b + "attention.output.weight"].T
        h = _norm(x, w[b + "mlp_norm.weight"]) @ w[b + "mlp.gate_up.weight"].T
        gate, up = h[..., : config.hidden], h[..., config.hidden :]
        x = x + (gate / (1 + (-gate).exp()) * up) @ w[b + "mlp.down.weight"].T
    return x


def _ids(*shape: int) -> Tensor:
    return torch.randint(0, 1024, shape, generator=torch.Generator().manual_seed(1))


def _cache(model: LanguageModel, batch: int, capacity: int = 20) -> ContiguousKVCache:
    config = model.config
    return ContiguousKVCache(
        layers=config.layers,
        batch=batch,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        capacity=capacity,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def _assert_close(a: Tensor, b: Tensor) -> None:
    assert (a - b).norm() <= 1e-5 * b.norm()


@torch.no_grad()
def test_logits_are_the_formula(language_model: LanguageModel) -> None:
    ids = _ids(2, 7)
    states = _norm(_reference_states(language_model, ids, 3), language_model.norm.weight)
    _assert_close(language_model.logits(ids), states @ language_model.embedding.weight.T)
    assert torch.equal(language_model(ids), language_model.logits(ids))


@torch.no_grad()
def test_an_untied_head_has_its_own_weights() -> None:
    config = LanguageModelConfig(
        vocab_size=50, width=8, layers=1, heads=1, kv_heads=1, head_width=8, hidden=8, tie_embeddings=False
    )
    model = LanguageModel(config)
    ids = torch.arange(5)[None]
    states = model.hidden_states(ids, torch.tensor([5]), layer=1, normed=True)
    assert model.head is not None
    _assert_close(model.logits(ids), states @ model.head.weight.T)
    assert "head.weight" in model.state_dict()


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_hidden_states_stop_at_their_layer(language_model: LanguageModel, layer: int) -> None:
    ids, lengths = _ids(2, 6), torch.tensor([6, 6])
    expected = _reference_states(language_model, ids, layer)
    for block in list(language_model.blocks)[layer:]:
        for parameter in block.parameters():
            parameter.fill_(torch.nan)
    _assert_close(language_model.hidden_states(ids, lengths, layer=layer, normed=False), expected)
    normed = language_model.hidden_states(ids, lengths, layer=layer, normed=True)
    _assert_close(normed, _norm(expected, language_model.norm.weight))


@pytest.mark.parametrize("layer", [-1, 4])
def test_a_layer_that_is_not_there_is_refused(language_model: LanguageModel, layer: int) -> None:
    with pytest.raises(ValueError, match=rf"layer is {layer}; this model has layers 0 to 3"):
        language_model.hidden_states(_ids(1, 3), torch.tensor([3]), layer=layer, normed=False)


@torch.no_grad()
def test_a_row_of_a_ragged_batch_is_that_row_alone(language_model: LanguageModel) -> None:
    ids, lengths = _ids(3, 8), torch.tensor([8, 3, 5])
    together = language_model.hidden_states(ids, lengths, layer=2, normed=False)
    for row, length in enumerate(lengths.tolist()):
        alone = language_model.hidden_states(ids[row : row + 1, :length], lengths[row : row + 1], layer=2, normed=False)
        _assert_close(together[row, :length], alone[0])
        assert not together[row, length:].any()


@torch.no_grad()
def test_token_by_token_is_one_pass(language_model: LanguageModel) -> None:
    ids = _ids(2, 9)
    whole = language_model.logits(ids)
    cache = _cache(language_model, 2)
    parts = [language_model.logits(ids[:, :4], cache=cache), language_model.logits(ids[:, 4:6], cache=cache)]
    parts += [language_model.logits(ids[:, n : n + 1], cache=cache) for n in range(6, 9)]
    _assert_close(torch.cat(parts, 1), whole)
    assert cache.lengths.tolist() == [9, 9]


@torch.no_grad()
def test_rows_of_unequal_prompts_decode_as_alone(language_model: LanguageModel) -> None:
    ids, counts = _ids(2, 9), torch.tensor([3, 6])
    cache = _cache(language_model, 2)
    language_model.logits(ids[:, :6], cache=cache, counts=counts)
    step = language_model.logits(ids[:, 6:7], cache=cache)
    again = language_model.logits(ids[:, 7:9], cache=cache)
    for row, count in enumerate(counts.tolist()):
        alone = language_model.logits(torch.cat([ids[row : row + 1, :count], ids[row : row + 1, 6:9]], 1))[0]
        _assert_close(step[row, 0], alone[count])
        _assert_close(again[row], alone[count + 1 : count + 3])


@torch.no_grad()
def test_the_context_ends(language_model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="41 tokens do not fit; the context length is 40"):
        language_model.logits(_ids(1, 41))
    cache = _cache(language_model, 1, capacity=64)
    language_model.logits(_ids(1, 40), cache=cache)
    with pytest.raises(ValueError, match="41 tokens do not fit"):
        language_model.logits(_ids(1, 1), cache=cache)


def test_new_weights_are_small_and_the_norms_are_one() -> None:
    config = LanguageModelConfig(vocab_size=500, width=64, layers=2, heads=2, kv_heads=2, head_width=32, hidden=64)
    model = LanguageModel(config)
    assert 0.019 < model.embedding.weight.std() < 0.021
    assert model.blocks[1].attention.output.weight.std() < 0.012
    assert torch.equal(model.norm.weight, torch.ones(64))


def test_a_model_can_be_made_without_memory() -> None:
    config = LanguageModelConfig(vocab_size=10**9, width=64, layers=1, heads=2, kv_heads=2, head_width=32, hidden=64)
    with torch.device("meta"):
        model = LanguageModel(config)
    assert all(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def test_embeddings_may_be_scaled_by_a_number_of_their_own_kind(language_model: LanguageModel) -> None:
    config = replace(language_model.config, embedding_scale=3.3)
    model = LanguageModel(config)
    model.load_state_dict(language_model.state_dict())
    ids, lengths = _ids(1, 3), torch.tensor([3])
    states = model.hidden_states(ids, lengths, layer=0, normed=False)
    assert torch.equal(states, language_model.embedding(ids) * 3.3)
    half = model.bfloat16().hidden_states(ids, lengths, layer=0, normed=False)
    assert torch.equal(half, model.embedding(ids) * torch.tensor(3.3).bfloat16())


@torch.no_grad()
@pytest.mark.parametrize("experts", [None, ExpertsConfig(count=4, active=2, hidden=24)])
def test_states_are_read_in_float32_where_products_in_bfloat16_are_slow(
    experts: ExpertsConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    half = LanguageModel(LanguageModelConfig(**SIZES, experts=experts)).bfloat16()
    exact = copy.deepcopy(half).float()
    ids, lengths, found = _ids(2, 9) % 50, torch.tensor([9, 4]), dict[bool, Tensor]()
    for has_products in (False, True):
        monkeypatch.setattr(row_product, "_HAS_BFLOAT16", has_products)
        found[has_products] = half.hidden_states(ids, lengths, layer=SIZES["layers"], normed=True)
    wanted = exact.hidden_states(ids, lengths, layer=SIZES["layers"], normed=True)
    wide, narrow = (float((found[way].float() - wanted).norm() / wanted.norm()) for way in (False, True))
    assert wide < narrow and wide < 0.01 and found[False].dtype is torch.bfloat16


@torch.no_grad()
def test_the_last_token_alone(language_model: LanguageModel) -> None:
    ids, counts = _ids(2, 6), torch.tensor([6, 4])
    whole = language_model.logits(ids)
    _assert_close(language_model.logits(ids, last_only=True)[:, 0], whole[:, 5])
    last = language_model.logits(ids, counts=counts, last_only=True)
    assert last.shape == (2, 1, 1024)
    _assert_close(last[:, 0], torch.stack([whole[0, 5], whole[1, 3]]))


SIZES = {"vocab_size": 50, "width": 8, "layers": 3, "heads": 2, "kv_heads": 1, "head_width": 4, "hidden": 8}


def test_layers_slide_as_the_config_says() -> None:
    plain = LanguageModelConfig(**SIZES)
    assert not any(plain.is_sliding(i) for i in range(3))
    assert plain.local_rotary is plain.rotary
    every = LanguageModelConfig(**SIZES, window=4)
    assert all(every.is_sliding(i) for i in range(3))
    mixed = LanguageModelConfig(**SIZES, window=4, sliding=(True, False, True), local_rope_theta=50.0)
    assert [mixed.is_sliding(i) for i in range(3)] == [True, False, True]
    assert (mixed.rotary.theta, mixed.local_rotary.theta) == (10000.0, 50.0)
    assert plain.kv_cache_bytes_per_token(torch.float32) == 2 * 3 * 1 * 4 * 4
    assert hash(mixed) != hash(plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 4, "sliding": (True,)}, "sliding marks 1 layers; this model has 3"),
        ({"sliding": (True, False, False)}, "sliding layers need a window"),
        ({"window": 0}, "window is 0"),
        ({"local_rope_theta": 5.0}, "local_rope_theta belongs to sliding layers"),
    ],
)
def test_impossible_windows_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LanguageModelConfig(**SIZES, **options)


def test_dense_layers_keep_their_mlp() -> None:
    experts = ExpertsConfig(count=4, active=2, hidden=6, dense_layers=(1,))
    model = LanguageModel(LanguageModelConfig(**SIZES, experts=experts))
    assert [isinstance(block.mlp, MixtureOfExperts) for block in model.blocks] == [True, False, True]
    assert model.blocks[0].mlp.down.std() < 0.012 < model.blocks[0].mlp.gate_up.std()
