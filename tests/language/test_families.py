"""Tiny random models of every family against transformers' own, and the configs of real ones."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calotype.core.attention.registry import attention_selector
from calotype.core.kv_cache import ContiguousKVCache, KVCache, LayeredKVCache, RingKVCache
from calotype.core.loading import build_on_meta
from calotype.core.moe import ExpertsConfig, Routing
from calotype.core.rotary import RotaryScaling
from calotype.language.checkpoints import load_transformers_model
from calotype.language.config import LanguageModelConfig
from calotype.language.families import family_of
from calotype.language.model import LanguageModel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

VOCABULARY, LENGTH = 99, 13
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 2e-3,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}


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


QWEN3_235B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 94,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_qwen3_235b_is_made_without_memory_in_no_time() -> None:
    config = family_of(QWEN3_235B).config(QWEN3_235B)
    assert config.experts == ExpertsConfig(count=128, active=8, hidden=1536)
    start = time.process_time()
    model = build_on_meta(lambda: LanguageModel(config))
    assert time.process_time() - start < 5
    assert sum(parameter.numel() for parameter in model.parameters()) == 235_093_634_560
    assert config.kv_cache_bytes_per_token(torch.bfloat16) == 94 * 2 * 4 * 128 * 2


def test_the_many_names_of_experts_are_placed_in_no_time() -> None:
    entries = QWEN3_235B | {"num_hidden_layers": 24}
    family = family_of(entries)
    config = family.config(entries)
    model = build_on_meta(lambda: LanguageModel(config))
    targets = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    layer = {
        "input_layernorm.weight": (4096,),
        "post_attention_layernorm.weight": (4096,),
        "self_attn.q_proj.weight": (8192, 4096),
        "self_attn.k_proj.weight": (512, 4096),
        "self_attn.v_proj.weight": (512, 4096),
        "self_attn.o_proj.weight": (4096, 8192),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "mlp.gate.weight": (128, 4096),
    }
    for expert in range(128):
        layer |= {f"mlp.experts.{expert}.{part}_proj.weight": (1536, 4096) for part in ("gate", "up")}
        layer[f"mlp.experts.{expert}.down_proj.weight"] = (4096, 1536)
    sources = {f"model.layers.{i}.{name}": shape for i in range(24) for name, shape in layer.items()}
    sources |= {"model.embed_tokens.weight": (151936, 4096), "lm_head.weight": (151936, 4096)}
    sources["model.norm.weight"] = (4096,)
    start = time.process_time()
    fills = family.key_map(config).plan(sources, targets)
    assert time.process_time() - start < 5
    assert [part.source for part in fills["blocks.7.mlp.gate_up"].parts[2:4]] == [
        "model.layers.7.mlp.experts.1.gate_proj.weight",
        "model.layers.7.mlp.experts.1.up_proj.weight",
    ]


def test_gemma_3_4b_is_read_from_its_sparse_text_config() -> None:
    entries = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    config = family_of(entries).config(entries)
    assert (config.vocab_size, config.heads, config.kv_heads, config.head_width) == (262208, 8, 4, 256)
    assert config.sliding == tuple((i + 1) % 6 != 0 for i in range(34))
    assert (config.window, config.rope_theta, config.local_rope_theta) == (1024, 1e6, 1e4)
    assert config.rope_scaling == RotaryScaling(kind="linear", factor=8.0)
    assert config.local_rotary.scaling is None
    assert (config.norm_offset, config.sandwich, config.activation) == (1.0, True, "gelu_tanh")
    assert config.attention_scale == 256**-0.5
    assert config.tie_embeddings


def test_gemma_with_eyes_has_its_text_model_found() -> None:
    text = SIZES | {"tie_word_embeddings": True, "layer_types": None}
    entries = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    family = family_of(entries)
    config = family.config(entries)
    model = build_on_meta(lambda: LanguageModel(config))
    targets = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    plain = transformers_names(config)
    for stem in ("language_model.model.", "model.language_model.", "model."):
        sources = {name.replace("model.", stem, 1): shape for name, shape in plain.items()}
        seeing = {"vision_tower.embeddings.weight": (3, 4), "model.multi_modal_projector.x": (2,)}
        assert family.key_map(config).plan(sources | seeing, targets).keys() == targets.keys()


def transformers_names(config: LanguageModelConfig) -> Mapping[str, tuple[int, ...]]:
    """The tensors of a tied Gemma."""
    heads, kv = config.heads * config.head_width, config.kv_heads * config.head_width
    shapes = {"model.embed_tokens.weight": (config.vocab_size, config.width), "model.norm.weight": (config.width,)}
    for i in range(config.layers):
        layer = f"model.layers.{i}."
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}{name}_layernorm.weight"] = (config.width,)
        for name, rows in (("q", heads), ("k", kv), ("v", kv)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, config.width)
        for name in ("q", "k"):
            shapes[f"{layer}self_attn.{name}_norm.weight"] = (config.head_width,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (config.width, heads)
        for name in ("gate", "up"):
            shapes[f"{layer}mlp.{name}_proj.weight"] = (config.hidden, config.width)
        shapes[f"{layer}mlp.down_proj.weight"] = (config.width, config.hidden)
    return shapes


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not .* known are LlamaForCausalLM"),
        ({"model_type": "bert"}, "model_type 'bert' is not a known language model"),
        ({"architectures": "T5"}, "architecture T5"),
        ({"attention_bias": True}, "attention_bias is True, which is not supported"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be a whole number over 0"),
        ({"vocab_size": None}, "the config has no vocab_size"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; supported are silu"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'; supported are default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "factor is None; it must be a number over 0"),
        ({"rope_scaling": 3}, "rotary parameters are 3"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1 is supported"),
    ],
)
def test_configs_that_cannot_be_read_say_why(entries: dict[str, Any], message: str) -> None:
    given = SIZES | {"architectures": ["LlamaForCausalLM"]} | entries
    if "model_type" in entries:
        del given["architectures"]
    with pytest.raises(ValueError, match=message):
        family_of(given).config(given)


@pytest.mark.parametrize(
    ("architecture", "entries", "message"),
    [
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": "2"}, "max_window_layers is '2'"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": ["1"], "num_experts": 8}, r"mlp_only_layers is \['1'\]"),
        ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 5}, "5 of 4 experts are active"),
        ("MistralForCausalLM", {"layer_types": "all"}, "layer_types is 'all'; it must be a list of words"),
        ("MistralForCausalLM", {"layer_types": ["full_attention"]}, "there must be 3, of full_attention"),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("Gemma3ForCausalLM", {"text_config": 3}, "text_config is 3"),
        (
            "Gemma3ForCausalLM",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "scales the rotary embedding of sliding layers",
        ),
    ],
)
def test_families_refuse_what_they_cannot_do(architecture: str, entries: dict[str, Any], message: str) -> None:
    given = SIZES | {"architectures": [architecture]} | entries
    with pytest.raises(ValueError, match=message):
        family_of(given).config(given)
