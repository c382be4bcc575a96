"""The configs of real models, what is wrong with some, and where the names in their files go."""

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tiny_llm import SIZES

from calotype.core.loading import build_on_meta
from calotype.core.moe import ExpertsConfig
from calotype.core.rotary import RotaryScaling
from calotype.language.config import LanguageModelConfig
from calotype.language.families import family_of
from calotype.language.model import LanguageModel

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
