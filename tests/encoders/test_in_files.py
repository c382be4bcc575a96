"""Text encoders in weights files: what their names and shapes tell (whole models: tests/pipelines/test_whole_files)."""

import dataclasses
import json
from pathlib import Path

import pytest
import tiny_decoders as tiny
import torch
from safetensors.torch import load_file, save_file
from tiny_text_encoders import t5_model, t5_tokenizer

from calotype.core.shapes import Shapes
from calotype.encoders.in_files import CLIP_L, MISTRAL, QWEN2_5_VL, UMT5, clip_g, clip_l, mistral, stored_encoder, t5
from calotype.encoders.t5 import load_t5
from calotype.encoders.vision_language import load_vision_language_encoder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
PUBLISHED = {
    "hidden_size": 128,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
SIGHT = {"hidden_size": 80, "num_heads": 1, "out_hidden_size": 128, "fullatt_block_indexes": [7, 15, 23, 31]}


@pytest.mark.parametrize("prefix", [QWEN2_5_VL.prefix, ""])
def test_a_language_model_that_sees(tmp_path: Path, prefix: str) -> None:
    """States of a prompt with a picture are those of the folder."""
    tokenizer = tiny.qwen_tokenizer()
    tiny.qwen_vl(tokenizer, PUBLISHED, **SIGHT).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "processor")
    (tmp_path / "processor" / "preprocessor_config.json").write_text(json.dumps(tiny.READS))
    weights = load_file(tmp_path / "model/model.safetensors")
    save_file({f"{prefix}{name}": tensor for name, tensor in weights.items()}, tmp_path / "x.safetensors")
    stored = stored_encoder(tmp_path / "x.safetensors", [dataclasses.replace(QWEN2_5_VL, prefix=prefix)])
    assert stored is not None
    mark = {"image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>")}  # the published one's is 151655
    stored = dataclasses.replace(stored, entries={**stored.entries, **mark})
    picture = torch.rand(3, 56, 84, generator=torch.Generator().manual_seed(0))
    one, other = (
        load_vision_language_encoder(source, tmp_path / "processor")(["a fox"], [[picture]])
        for source in (stored, tmp_path / "model")
    )
    assert torch.equal(one.states, other.states)


def test_umt5_with_its_tokenizer_inside(tmp_path: Path) -> None:
    """As ComfyUI saves it; states are those of the folder."""
    published = {"layer_norm_epsilon": 1e-6, "relative_attention_max_distance": 128}
    t5_model(umt5=True, **published).save_pretrained(tmp_path / "model")
    t5_tokenizer().save_pretrained(tmp_path / "tokenizer")
    weights = load_file(tmp_path / "model/model.safetensors")
    inside = {"spiece_model": torch.zeros(9, dtype=torch.uint8)}
    save_file({**weights, **inside}, tmp_path / "umt5.safetensors")
    stored = stored_encoder(tmp_path / "umt5.safetensors", [dataclasses.replace(UMT5, prefix="")])
    assert stored is not None
    one, other = (
        load_t5(source, tmp_path / "tokenizer", max_tokens=20, pad_to_max=False, masked=True)(["a red fox", "cat"])
        for source in (stored, tmp_path / "model")
    )
    assert torch.equal(one.states, other.states)


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    save_file({"vae.x": torch.zeros(1)}, tmp_path / "x.safetensors")
    assert stored_encoder(tmp_path / "x.safetensors", (CLIP_L, MISTRAL)) is None


def test_the_published_sizes() -> None:
    """Of CLIP-L, bigG and T5-XXL."""
    small = clip_l(clip(768, 3072, 12))
    assert (small["num_attention_heads"], small["num_hidden_layers"], small["hidden_act"]) == (12, 12, "quick_gelu")
    assert (small["architectures"], small["projection_dim"]) == (["CLIPTextModel"], 768)
    large = clip_g(Shapes({**clip(1280, 5120, 32).shapes, "text_projection.weight": (1280, 1280)}))
    assert (large["num_attention_heads"], large["hidden_act"], large["projection_dim"]) == (20, "gelu", 1280)
    block = "encoder.block.{}.layer."
    names = {
        "shared.weight": (32128, 4096),
        block.format(0) + "0.SelfAttention.relative_attention_bias.weight": (32, 64),
        block.format(0) + "0.SelfAttention.q.weight": (4096, 4096),
        block.format(23) + "0.SelfAttention.q.weight": (4096, 4096),
        block.format(0) + "1.DenseReluDense.wi_0.weight": (10240, 4096),
    }
    found = t5(Shapes(names))
    assert (found["d_kv"], found["d_ff"], found["num_layers"], found["num_heads"]) == (64, 10240, 24, 64)


def clip(width: int, hidden: int, layers: int) -> Shapes:
    return Shapes(
        {
            "text_model.embeddings.token_embedding.weight": (49408, width),
            "text_model.embeddings.position_embedding.weight": (77, width),
            **{f"text_model.encoder.layers.{i}.mlp.fc1.weight": (hidden, width) for i in range(layers)},
        }
    )


def test_sizes_that_are_none() -> None:
    with pytest.raises(ValueError, match="states are 100 wide, which is no multiple of 64"):
        clip_l(clip(100, 400, 2))
    with pytest.raises(ValueError, match=r"holds no embed_tokens\.weight"):
        mistral(clip(64, 256, 1))
