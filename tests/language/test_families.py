"""Tiny random models of every family against transformers' own."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llm import SIZES
from torch import Tensor, nn

from calotype.core.attention.registry import attention_selector
from calotype.core.kv_cache import ContiguousKVCache, KVCache, LayeredKVCache, RingKVCache
from calotype.core.moe import Routing
from calotype.language.checkpoints import load_transformers_model
from calotype.language.families import family_of
from calotype.language.model import LanguageModel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

VOCABULARY, LENGTH = SIZES["vocab_size"], 13


def rope(theta: float, **extra: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | extra}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", rope(300.0, **LLAMA3) | {"tie_word_embeddings": True}),
    "llama-yarn": ("Llama", rope(300.0, **YARN)),
    "llama-mscale": ("Llama", rope(300.0, **YARN, mscale=0.7, mscale_all_dim=0.4, truncate=False)),
    "qwen2": ("Qwen2", rope(500.0) | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen3": ("Qwen3", rope(400.0)),
    "qwen3_moe": (
        "Qwen3Moe",
        rope(400.0)
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
        | {"mlp_only_layers": [1]},
    ),
    "qwen3_moe-plain": (
        "Qwen3Moe",
        rope(400.0)
        | {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": False}
        | {"decoder_sparse_step": 2},
    ),
    "mistral": ("Mistral", rope(700.0) | {"sliding_window": 4}),
    "gemma3": (
        "Gemma3",
        {
            "query_pre_attn_scalar": 20,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
            },
        },
    ),
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same weights in both libraries."""

    theirs: nn.Module
    ours: LanguageModel
    folder: Path


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    import transformers

    name, options = MODELS[request.param]
    config_class = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    config = config_class(**(SIZES | options))
    config._attn_implementation = "eager"
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    randomise(theirs, norm_centre=0.0 if name == "Gemma3" else 1.0)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return Pair(theirs=theirs, ours=load(folder), folder=folder)


@torch.no_grad()
def randomise(model: nn.Module, *, norm_centre: float) -> None:
    """Weights large enough that every layer, bias and expert matters."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(norm_centre + 0.3 * noise)
        elif "embed" in name:
            parameter.copy_(noise)
        else:
            parameter.copy_(noise if parameter.dim() == 1 else 2 * noise * parameter.shape[-1] ** -0.5)


def load(folder: Path) -> LanguageModel:
    return load_transformers_model(
        folder, device=torch.device("cpu"), dtype=torch.float32, attention=attention_selector("sdpa")
    )


def ids_of(*shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def assert_close(a: Tensor, b: Tensor) -> None:
    """Within 1e-5 in every row."""
    for x, y in zip(a, b, strict=True):
        assert float((x - y).norm() / y.norm()) <= 1e-5


@torch.no_grad()
def test_logits_are_those_of_transformers(pair: Pair) -> None:
    lengths = torch.tensor([LENGTH, 5, 9])
    valid = torch.arange(LENGTH) < lengths[:, None]
    ids = torch.where(valid, ids_of(3, LENGTH), 0)
    expected = pair.theirs(input_ids=ids, attention_mask=valid.long()).logits
    got = pair.ours.logits(ids)
    last = pair.ours.logits(ids, counts=lengths, last_only=True)
    assert last.shape == (3, 1, VOCABULARY)
    for row, length in enumerate(lengths.tolist()):
        assert_close(got[row : row + 1, :length], expected[row : row + 1, :length])
        assert_close(last[row], expected[row, length - 1 : length])


@torch.no_grad()
def test_hidden_states_are_those_of_transformers(pair: Pair) -> None:
    ids = ids_of(2, LENGTH)
    states = pair.theirs(input_ids=ids, output_hidden_states=True).hidden_states
    lengths = torch.tensor([LENGTH, LENGTH])
    for layer in range(3):
        assert_close(pair.ours.hidden_states(ids, lengths, layer=layer, normed=False), states[layer])
    assert_close(pair.ours.hidden_states(ids, lengths, layer=3, normed=True), states[3])


def full_cache(model: LanguageModel, rows: int) -> KVCache:
    """Every token of every layer, without a word on windows."""
    config = model.config
    return ContiguousKVCache(
        layers=config.layers,
        batch=rows,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        capacity=LENGTH,
    )


def layered_cache(model: LanguageModel, rows: int) -> KVCache:
    """Rings for the layers that slide."""
    config = model.config
    sliding = [config.is_sliding(i) for i in range(config.layers)]
    if config.window is None or not any(sliding):
        return full_cache(model, rows)
    ring = RingKVCache(
        layers=sum(sliding),
        batch=rows,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        window=config.window,
        chunk=4,
    )
    if all(sliding):
        return ring
    full = ContiguousKVCache(
        layers=config.layers - sum(sliding),
        batch=rows,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        capacity=LENGTH,
    )
    return LayeredKVCache([full, ring], [int(each) for each in sliding])


@pytest.mark.parametrize("make_cache", [full_cache, layered_cache])
@torch.no_grad()
def test_token_by_token_and_in_chunks_is_one_pass(
    pair: Pair, make_cache: Callable[[LanguageModel, int], KVCache]
) -> None:
    model, ids = pair.ours, ids_of(2, LENGTH)
    whole = model.logits(ids)
    cache = make_cache(model, 2)
    assert_close(torch.cat([model.logits(ids[:, n : n + 1], cache=cache) for n in range(LENGTH)], 1), whole)
    cache = make_cache(model, 2)
    parts = [model.logits(ids[:, :6], cache=cache), model.logits(ids[:, 6:10], cache=cache)]
    parts += [model.logits(ids[:, n : n + 1], cache=cache) for n in range(10, LENGTH)]
    assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("make_cache", [full_cache, layered_cache])
@torch.no_grad()
def test_rows_of_different_lengths_decode_as_alone(
    pair: Pair, make_cache: Callable[[LanguageModel, int], KVCache]
) -> None:
    model, ids, counts = pair.ours, ids_of(2, LENGTH), torch.tensor([3, 8])
    cache = make_cache(model, 2)
    first = model.logits(ids[:, :8], cache=cache, counts=counts, last_only=True)
    steps = [model.logits(ids[:, 8 + n : 9 + n], cache=cache) for n in range(5)]
    for row, count in enumerate(counts.tolist()):
        alone = model.logits(torch.cat((ids[row : row + 1, :count], ids[row : row + 1, 8:]), 1))
        got = torch.cat((first[row], *(step[row] for step in steps)))
        assert_close(got[None], alone[:, count - 1 :])


@torch.no_grad()
def test_routing_tells_the_experts_of_each_sparse_layer(pair: Pair) -> None:
    experts, ids, routing = pair.ours.config.experts, ids_of(2, 4), Routing()
    for part in ids.split(2, dim=1):
        pair.ours.logits(part, routing=routing)
    if experts is None:
        assert routing.visits == {}
        return
    sparse = [i for i in range(3) if experts.is_sparse(i)]
    assert list(routing.visits) == list(routing.touched) == sparse
    for i in sparse:
        assert sum(routing.visits[i]) == ids.numel() * experts.active
        assert all(routing.visits[i][e] for e in routing.touched[i])


def test_experts_in_one_stack_load_as_those_in_many_tensors(pair: Pair, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    if pair.ours.config.experts is None:
        return
    stacked = {name: tensor.contiguous() for name, tensor in pair.theirs.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in stacked)
    assert any(".experts.0.gate_proj" in name for name in load_file(pair.folder / "model.safetensors"))
    save_file(stacked, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((pair.folder / "config.json").read_text())
    again = load(tmp_path)
    for name, weight in pair.ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


def test_the_older_spelling_of_a_config_says_the_same(pair: Pair) -> None:
    entries = json.loads((pair.folder / "config.json").read_text())
    expected = family_of(entries).config(entries)
    assert expected == pair.ours.config
    parameters = entries.pop("rope_parameters")
    if "full_attention" in parameters:
        entries["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    entries["rope_theta"] = parameters.pop("rope_theta")
    entries["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
    assert family_of(entries).config(entries) == expected
    if entries["rope_scaling"] is not None:
        entries["rope_scaling"]["type"] = entries["rope_scaling"].pop("rope_type")
    assert family_of(entries | {"architectures": None}).config(entries) == expected
