"""Which files of a component are its weights, in folders and in repositories."""

import json
from pathlib import Path

import pytest

from calotype.core.component_files import component_files, component_weights, is_index, refuse_quantised, weights_files

STEM = "diffusion_pytorch_model"
FULL = {f"{STEM}-0000{n}-of-00002.safetensors" for n in (1, 2)} | {f"{STEM}.safetensors.index.json"}
HALF = {f"{STEM}.fp16-0000{n}-of-00002.safetensors" for n in (1, 2)} | {f"{STEM}.safetensors.index.fp16.json"}


@pytest.mark.parametrize(
    ("names", "variant", "expected"),
    [
        (FULL | HALF | {"config.json", f"{STEM}.bin"}, None, FULL | {"config.json"}),
        (FULL | HALF | {"config.json"}, "fp16", HALF | {"config.json"}),
        (FULL | {"config.json"}, "fp16", FULL | {"config.json"}),
        ({"model.safetensors", "model.fp16.safetensors", "model.onnx"}, None, {"model.safetensors"}),
        ({"model.safetensors", "model.fp16.safetensors"}, "fp16", {"model.fp16.safetensors"}),
        ({"model.safetensors", "consolidated.safetensors"}, None, {"model.safetensors"}),
        ({"odd.safetensors", "config.json"}, None, {"odd.safetensors", "config.json"}),
        (
            {"tokenizer.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "README.md"},
            None,
            {"tokenizer.json", "merges.txt", "tokenizer.model", "chat_template.jinja"},
        ),
    ],
)
def test_one_copy_of_a_repository_is_wanted(names: set[str], variant: str | None, expected: set[str]) -> None:
    inside = {f"unet/{name}" for name in names} | {"unet/onnx/model.safetensors", "flux.safetensors"}
    assert component_files(inside, "unet", variant) == {f"unet/{name}" for name in expected}
    assert component_files(names | {"unet/model.safetensors"}, "", variant) == expected


def test_only_pickled_weights() -> None:
    with pytest.raises(ValueError, match=r"unet holds only pickled weights \(model.bin\), which are never loaded"):
        component_files({"unet/model.bin", "unet/config.json"}, "unet")


def test_files_of_a_folder(tmp_path: Path) -> None:
    for name in (f"{STEM}.safetensors", "model.fp16.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert component_weights(tmp_path) == tmp_path / f"{STEM}.safetensors"
    assert weights_files(tmp_path, "fp16") == tmp_path / "model.fp16.safetensors"
    assert weights_files(tmp_path, "bf16") == tmp_path / f"{STEM}.safetensors"
    with pytest.raises(FileNotFoundError, match="the folder has no variant 'bf16'"):
        component_weights(tmp_path, "bf16")


ENDS = ("safetensors.index.fp16", "safetensors.fp16.index", "fp16.safetensors.index")
"""As diffusers names it, as it did before, and as files are named."""


@pytest.mark.parametrize("end", ENDS)
def test_an_index_of_a_variant(end: str, tmp_path: Path) -> None:
    index = f"{STEM}.{end}.json"
    (tmp_path / index).write_bytes(b"")
    assert component_weights(tmp_path, "fp16") == tmp_path / index
    assert component_weights(tmp_path) == tmp_path
    assert is_index(index, "fp16") and not is_index(index, None) and not is_index(index, "bf16")
    shard = f"{STEM}.fp16-00001-of-00001.safetensors"
    assert component_files({index, shard, f"{STEM}.safetensors"}, "", "fp16") == {index, shard}


def test_an_index_of_no_variant() -> None:
    assert is_index("model.safetensors.index.json", None) and not is_index("model.safetensors.index.json", "fp16")
    assert not is_index("model.bin.index.json", None) and not is_index("config.json", None)


def test_one_of_several_shards_stands_for_all(tmp_path: Path) -> None:
    names = tuple(tmp_path / f"x-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
    assert weights_files(names[1]) == names
    assert weights_files(tmp_path / "x.safetensors") == (tmp_path / "x.safetensors",)


def test_quantised_components_are_refused(tmp_path: Path) -> None:
    refuse_quantised(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match=r"quantised \(gptq\)"):
        refuse_quantised(tmp_path)
