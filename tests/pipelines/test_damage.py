"""Weights that are not finite themselves are named, with their file."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import calotype
from calotype.core.checkpoint import read_checkpoint
from calotype.core.weight_source import WeightSource, first_not_finite
from calotype.pipelines import damage as damage_module
from calotype.pipelines.finite import NonFiniteError
from calotype.pipelines.image import ImagePipeline

from ..tiny_qwen_image import qwen_image_pipeline

ARGUMENTS: dict[str, Any] = {"num_inference_steps": 1, "height": 32, "width": 32, "seed": 1}


def damage(file: Path, part: str) -> str:
    """Puts an infinity into the first tensor whose name has this part; gives the name."""
    weights = load_file(file)
    name = next(name for name in sorted(weights) if part in name)
    weights[name].view(-1)[-1] = torch.inf
    save_file(weights, file, {"format": "pt"})
    return name


@pytest.mark.parametrize(
    ("file", "part", "stage"),
    [
        ("language.safetensors", "blocks.0.", "encode"),
        ("denoiser.safetensors", "blocks.1.", "denoise, step 0 of 1 .*"),
        ("vae.safetensors", "decoder.", "decode"),
    ],
)
def test_a_plate_folder(plate_folder: Path, tmp_path: Path, file: str, part: str, stage: str) -> None:
    """One without digests, as older ones are: a damaged file is found by what comes out of it."""
    folder = tmp_path / "plate"
    shutil.copytree(plate_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["sha256"]
    (folder / "config.json").write_text(json.dumps(config))
    name = damage(folder / file, part)
    with pytest.raises(NonFiniteError, match=f"non-finite values in {stage}; weights are not finite") as caught:
        calotype.load(folder)("a fox", **ARGUMENTS)
    assert caught.value.weight == f"{name} in {folder / file}"


def test_a_search_that_fails_hides_nothing(plate_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(*arguments: object) -> None:
        raise ValueError("is packed and cannot be saved")

    pipe = calotype.load(plate_folder)
    with torch.no_grad():
        pipe.vae.decoder[0].bias[0] = torch.nan
    monkeypatch.setattr(damage_module, "damaged_weight", packed)
    with pytest.raises(NonFiniteError, match="non-finite values in decode"):
        pipe("a fox", **ARGUMENTS)


def test_weights_in_8_bits_in_files_are_looked_at(tmp_path: Path) -> None:
    values = torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn)
    save_file({"a": values[:1].clone(), "b": values}, tmp_path / "w.safetensors")
    source = WeightSource.as_stored(read_checkpoint(tmp_path / "w.safetensors"))
    assert [bool(source.read(name, dtype=torch.float32).isfinite().all()) for name in ("a", "b")] == [True, False]


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage") / "qwen"
    qwen_image_pipeline(folder)
    return folder


@pytest.mark.parametrize("offload", ["none", "blocks"])
@pytest.mark.parametrize(
    ("place", "part", "stage"),
    [
        ("text_encoder/model.safetensors", "layers.0.mlp.down_proj.", "encode"),
        ("transformer/diffusion_pytorch_model.safetensors", "transformer_blocks.1.attn.to_k.", "denoise"),
        ("vae/diffusion_pytorch_model.safetensors", "decoder.conv_in.", "decode"),
    ],
)
def test_a_folder_in_diffusers_layout(
    qwen_folder: Path, tmp_path: Path, place: str, part: str, stage: str, offload: Any
) -> None:
    """By the names that its files have, also where weights stay in them."""
    shutil.copytree(qwen_folder, tmp_path / "m")
    name = damage(tmp_path / "m" / place, part)
    pipe = calotype.load(tmp_path / "m", offload=offload)
    with pytest.raises(NonFiniteError) as caught:
        pipe("a fox", max_sequence_length=16, **ARGUMENTS)
    assert (caught.value.stage, caught.value.weight) == (stage, f"{name} in {tmp_path / 'm' / place}")


def test_weights_that_were_changed_in_memory(tiny_plate: ImagePipeline, qwen_folder: Path) -> None:
    """They have no file, or a sound one: the part is named. The cause of an error in what was given is none of them."""
    pipe = calotype.load(qwen_folder)
    next(pipe.denoiser.parameters()).data.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"weights are not finite themselves: [a-z_.]+ of transformer$"):
        pipe("a fox", max_sequence_length=16, **ARGUMENTS)
    states = tiny_plate.encode(calotype.Request(prompt="a fox")).conditioning.positive
    broken = dataclasses.replace(states, states=states.states * torch.nan)
    with pytest.raises(NonFiniteError) as caught:
        tiny_plate(conditioning=broken, guidance_scale=1.0)
    assert caught.value.weight is None and str(caught.value) == "non-finite values in encode"


def test_all_formats_are_looked_through(tmp_path: Path) -> None:
    sound = {
        "a": torch.ones(3, dtype=torch.int64),
        "b": torch.ones(2, 2, dtype=torch.float8_e4m3fn),
        "c": torch.ones((), dtype=torch.bfloat16),
    }
    file = tmp_path / "m.safetensors"
    save_file(sound, file)
    assert first_not_finite(file) is None
    save_file(sound | {"d": torch.tensor([1.0, -torch.inf], dtype=torch.float16)}, file)
    found = first_not_finite(file)
    assert found is not None and (found.name, found.file) == ("d", file)
