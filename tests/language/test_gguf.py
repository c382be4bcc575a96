"""Tiny random models of transformers, written as llama.cpp writes them, and read back."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, RopeScalingType, get_tensor_name_map, quantize
from torch import Tensor

from calotype.language.gguf import load_gguf

SIZES = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
}
ROPE = {"rope_type": "default", "rope_theta": 3000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 3000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 3000.0, "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 4.0},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A config of transformers and llama.cpp's name for the architecture."""

    arch: MODEL_ARCH
    config: Callable[[], Any]


CASES = {
    "llama": Case(
        arch=MODEL_ARCH.LLAMA, config=lambda: transformers.LlamaConfig(**SIZES, rope_parameters=ROPE, head_dim=16)
    ),
    "llama3": Case(
        arch=MODEL_ARCH.LLAMA,
        config=lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=True),
    ),
    "mistral": Case(
        arch=MODEL_ARCH.LLAMA,
        config=lambda: transformers.MistralConfig(**SIZES, rope_parameters=ROPE, sliding_window=None, head_dim=32),
    ),
    "qwen2": Case(arch=MODEL_ARCH.QWEN2, config=lambda: transformers.Qwen2Config(**SIZES, rope_parameters=YARN)),
    "qwen3": Case(
        arch=MODEL_ARCH.QWEN3, config=lambda: transformers.Qwen3Config(**SIZES, rope_parameters=ROPE, head_dim=32)
    ),
    "qwen3moe": Case(
        arch=MODEL_ARCH.QWEN3MOE,
        config=lambda: transformers.Qwen3MoeConfig(
            **SIZES,
            rope_parameters=ROPE,
            head_dim=32,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
        ),
    ),
    "gemma3": Case(
        arch=MODEL_ARCH.GEMMA3,
        config=lambda: transformers.Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 7},
            rope_parameters=GEMMA_ROPE,
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=4,
        ),
    ),
}


def model_of(case: Case) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(case.config(), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3 if "norm" in name else parameter.shape[-1] ** -0.5)
            if "norm" in name and case.arch is not MODEL_ARCH.GEMMA3:
                parameter.add_(1)
    return model


def metadata(writer: GGUFWriter, config: Any, arch: MODEL_ARCH) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(3000.0)
    head_width = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_width)
    writer.add_value_length(head_width)
    if arch is MODEL_ARCH.LLAMA:
        writer.add_rope_dimension_count(head_width)
    if arch is MODEL_ARCH.QWEN2:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)
    if arch is MODEL_ARCH.QWEN3MOE:
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(32)
    if arch is MODEL_ARCH.GEMMA3:
        writer.add_sliding_window(4)
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
        writer.add_float32("gemma3.rope.freq_base_swa", 500.0)


def vocabulary(writer: GGUFWriter, count: int = 48) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(ord("!") + n) for n in range(count)])
    writer.add_token_types([1] * count)


def stored(model: Any, arch: MODEL_ARCH) -> dict[str, Tensor]:
    """llama.cpp's tensors, by its names."""
    config, names = model.config, get_tensor_name_map(arch, model.config.num_hidden_layers)
    tensors: dict[str, Tensor] = {}
    for name, x in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            block = name.split(".")[2]
            for part, half in zip(("gate", "up"), x.chunk(2, dim=1), strict=True):
                tensors[f"blk.{block}.ffn_{part}_exps.weight"] = half
            continue
        stem = name if name.endswith(("weight", "bias")) else f"{name}.weight"
        if arch is MODEL_ARCH.LLAMA and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            x = x.view(heads, 2, -1, x.shape[-1]).transpose(1, 2).reshape(x.shape)
        if arch is MODEL_ARCH.GEMMA3 and "norm" in name:
            x = x + 1
        found = names.get_name(stem, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        tensors[found] = x
    return tensors


def rope_factors(width: int) -> Tensor:
    """As llama.cpp's converter computes them for `LLAMA3`."""
    frequencies = 1.0 / 3000.0 ** (torch.arange(0, width, 2) / width)
    factors: list[float] = []
    for frequency in frequencies.tolist():
        wavelength = 2 * math.pi / frequency
        if wavelength < 16 / 4.0:
            factors.append(1.0)
        elif wavelength > 16 / 1.0:
            factors.append(8.0)
        else:
            smooth = (16 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    return torch.tensor(factors)


def write(
    path: Path,
    model: Any,
    arch: MODEL_ARCH,
    *,
    extra: dict[str, Tensor] | None = None,
    quantised: str = "F32",
    edit: Callable[[GGUFWriter], None] = lambda writer: None,
    tokens: int = 48,
) -> Path:
    from gguf import MODEL_ARCH_NAMES

    writer = GGUFWriter(path, MODEL_ARCH_NAMES[arch])
    metadata(writer, model.config, arch)
    vocabulary(writer, tokens)
    edit(writer)
    for name, x in (stored(model, arch) | (extra or {})).items():
        code = GGMLQuantizationType[quantised if x.dim() > 1 else "F32"]
        writer.add_tensor(name, quantize(x.detach().numpy(), code), raw_dtype=code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    theirs = model_of(case)
    extra = {"rope_freqs.weight": rope_factors(16)} if name == "llama3" else None
    ours, tokenizer = load_gguf(write(tmp_path / "m.gguf", theirs, case.arch, extra=extra))
    assert tokenizer.vocab_size == 48 and not ours.training
    assert not any(weight.requires_grad or weight.is_meta for weight in ours.parameters())
    ids = torch.randint(0, 48, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, found = theirs(ids).logits, ours.logits(ids)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert (ours.head is None) == theirs.config.tie_word_embeddings


def test_quantised_files_and_other_dtypes(tmp_path: Path) -> None:
    theirs = model_of(CASES["llama"])
    path = write(tmp_path / "m.gguf", theirs, MODEL_ARCH.LLAMA, quantised="Q8_0")
    ours, _ = load_gguf(path)
    wanted = theirs.state_dict()["model.embed_tokens.weight"]
    assert 0 < float((ours.embedding.weight - wanted).norm() / wanted.norm()) < 0.01
    half, _ = load_gguf(path, dtype=torch.bfloat16)
    assert torch.equal(half.blocks[1].attention.qkv.weight, ours.blocks[1].attention.qkv.weight.bfloat16())


def refused(tmp_path: Path, edit: Callable[[GGUFWriter], None], match: str, **options: Any) -> None:
    path = write(tmp_path / "m.gguf", model_of(CASES["llama"]), MODEL_ARCH.LLAMA, edit=edit, **options)
    with pytest.raises(ValueError, match=match):
        load_gguf(path)


def test_unknown_architectures_are_named(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("a", quantize(torch.ones(2, 2).numpy(), GGMLQuantizationType.F32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture 'mamba' is not known; known are llama, qwen2, qwen3, qwen3moe"):
        load_gguf(tmp_path / "m.gguf")
    with pytest.raises(FileNotFoundError, match="no weights file"):
        load_gguf(tmp_path / "absent.gguf")


def put(key: str, value: Any) -> Callable[[GGUFWriter], None]:
    """Set an entry, or take it out (None)."""

    def edit(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)

    return edit


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (put("llama.block_count", None), "has no llama.block_count"),
        (put("llama.block_count", "two"), "llama.block_count is 'two'; it must be a whole number over 0"),
        (put("llama.attention.layer_norm_rms_epsilon", 0), "rms_epsilon is 0; it must be a number over 0"),
        (put("llama.rope.dimension_count", 8), "rope.dimension_count is 8; it must be the width of a head, 16"),
        (put("llama.attention.value_length", 8), "value_length is 8; it must be the width of a head, 16"),
        (put("llama.expert_count", 8), "llama models with experts are not supported"),
        (put("llama.rope.scaling.type", "longrope"), "scaling.type is 'longrope'; it must be none, linear or yarn"),
        (put("llama.rope.scaling.type", 3), "scaling.type is 3; it must be a word"),
        (put("llama.block_count", 1), "does not fit the model"),
        (put("llama.block_count", 10**9), "llama.block_count is 1000000000; it can be at most 1024 here"),
        (put("llama.rope.freq_base", math.inf), "rope.freq_base is inf; it must be a number over 0"),
    ],
)
def test_senseless_entries_are_named(tmp_path: Path, edit: Callable[[GGUFWriter], None], match: str) -> None:
    refused(tmp_path, edit, match)


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, lambda writer: None, "its vocabulary has 60 tokens, but the model has 48 embeddings", tokens=60)


def test_linear_scaling_and_none(tmp_path: Path) -> None:
    def linear(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    theirs = model_of(CASES["llama"])
    scaled, _ = load_gguf(write(tmp_path / "a.gguf", theirs, MODEL_ARCH.LLAMA, edit=linear))
    assert scaled.config.rope_scaling is not None and scaled.config.rope_scaling.factor == 2
    plain, _ = load_gguf(
        write(tmp_path / "b.gguf", theirs, MODEL_ARCH.LLAMA, edit=put("llama.rope.scaling.type", "none"))
    )
    assert plain.config.rope_scaling is None
