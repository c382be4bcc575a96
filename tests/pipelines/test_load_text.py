"""One door for every language model."""

import json
from pathlib import Path

import pytest
import torch

from calotype.core.ops.packed import PackedLinear
from calotype.pipelines.load import bundled_folder, load
from calotype.pipelines.load_text import load_language_model
from calotype.pipelines.plate import text_model_of


def test_a_folder_in_transformers_layout(llama_folder: Path):
    from transformers import LlamaForCausalLM

    model = load_language_model(llama_folder)
    ids = torch.tensor([[1, 70, 80, 90]])
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)(ids).logits
    assert torch.allclose(model.logits(ids), expected, atol=1e-5)
    assert model.name == str(llama_folder)
    assert model.chat_prompt([{"role": "user", "content": "hi"}]) == "[user] hi\n[assistant] "


def test_the_bundled_one_and_saved_ones(plate_folder: Path):
    bundled = load_language_model()
    assert bundled.language_model.config.context_length == 64
    assert load_language_model("plate").generate("a fox", max_tokens=3).text == (
        load_language_model(bundled_folder()).generate("a fox", max_tokens=3).text
    )
    assert load_language_model(plate_folder).expand_token is not None


def test_a_pipelines_own_language_model(plate_folder: Path):
    encoder = load(plate_folder).encoders["llm"]
    model = text_model_of(encoder)  # pyright: ignore[reportArgumentType]
    assert model.language_model is encoder.language_model  # pyright: ignore[reportAttributeAccessIssue]
    assert model.generate("a fox", max_tokens=3).token_ids == (
        load_language_model(plate_folder).generate("a fox", max_tokens=3).token_ids
    )


@pytest.mark.parametrize("kind", ["int8", "int4", "w8a8"])
def test_packed_weights_report_their_error(llama_folder: Path, kind: str):
    plain = load_language_model(llama_folder)
    packed = load_language_model(llama_folder, packed=kind)  # pyright: ignore[reportArgumentType]
    assert plain.packing is None and packed.packing is not None
    assert 0 < packed.packing.mean_error < (0.12 if kind == "int4" else 0.012)
    assert isinstance(packed.language_model.head, PackedLinear)
    assert packed.packing.bytes_after < packed.packing.bytes_before
    ids = torch.tensor([[1, 70, 80, 90]])
    difference = (packed.logits(ids) - plain.logits(ids)).norm() / plain.logits(ids).norm()
    assert 0 < float(difference) < (0.05 if kind == "int8" else 0.5)
    assert packed.generate("a fox", max_tokens=2).token_ids


def test_other_sources_are_refused(tmp_path: Path, llama_folder: Path):
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text("{}")
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ValueError, match="a pipeline in diffusers' layout, not a language model; its parts are unet"):
        load_language_model(tmp_path)
    with pytest.raises(ValueError, match="cannot load 3, of type int"):
        load_language_model(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_language_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_language_model(_empty(tmp_path))
    with pytest.raises(ValueError, match="packed is 'int2'; it must be 'int8', 'int4', 'w8a8' or None"):
        load_language_model(llama_folder, packed="int2")  # pyright: ignore[reportArgumentType]


def _empty(folder: Path) -> Path:
    made = folder / "empty"
    made.mkdir()
    return made


def test_a_config_that_is_not_json(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not a config file"):
        load_language_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BambaForCausalLM"], "model_type": "bamba"}))
    with pytest.raises(ValueError, match="BambaForCausalLM"):
        load_language_model(tmp_path)
