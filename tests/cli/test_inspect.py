"""`calotype inspect`, on every kind of model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import calotype
from calotype.core.weight_source import WeightSource

from ..tiny_flux import flux_pipeline, in_original_layout
from ..tiny_hunyuan_video import hunyuan_video_pipeline
from ..tiny_ltx_pipeline import ltx_pipeline
from ..tiny_sd import sd_pipeline
from ..tiny_wan_pipeline import wan_pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("models") / "flux"
    flux_pipeline(True, where)
    return where


def inspected(run: Any, path: object) -> dict[str, Any]:
    code, out, err = run("inspect", path, "--json")
    assert (code, err) == (0, [])
    return json.loads("\n".join(out))


def test_a_folder_in_diffusers_layout(run: Any, folder: Path) -> None:
    found = inspected(run, folder)
    assert (found["family"], found["kind"], found["missing"]) == ("FLUX.1", "a folder in diffusers' layout", [])
    parts = {part["name"]: part for part in found["components"]}
    assert set(parts) == {"transformer", "vae", "text_encoder", "text_encoder_2"}
    for name, part in parts.items():
        tensors = load_file(next((folder / name).glob("*.safetensors"))).values()
        count = sum(tensor.numel() for tensor in tensors)
        assert (part["parameters"], part["bytes"]) == (count, 4 * count)
        assert part["formats"] == {"float32": count}
    total = sum(part["parameters"] for part in parts.values())
    assert found["parameters"] == total
    largest = max(x.numel() for name in parts for x in load_file(next((folder / name).glob("*.safetensors"))).values())
    assert found["load"] == {"float32": 4 * (total + largest), "bfloat16": 2 * (total + largest)}
    values = max((64 * 64 + 512) * 32 * 20, 1024 * 1024 * 8 * 4)
    assert found["run"] == {"float32": 4 * (total + values), "bfloat16": 2 * (total + values)}
    assert "4608 tokens x 32 wide x 20" in found["estimate"]


CLIPS: dict[str, Any] = {
    "ltx": (ltx_pipeline, 40, (704, 512, 161, 8, 32)),
    "hunyuan": (hunyuan_video_pipeline, 32, (848, 480, 121, 4, 16)),
    "wan": (wan_pipeline, 42, (832, 480, 81, 4, 16)),
}
"""What makes a model, how wide it is, and its clip: width, height, frames, frames a group, pixels a side of a token."""


@pytest.fixture(scope="module", params=CLIPS)
def clips(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    where = tmp_path_factory.mktemp("models") / request.param
    CLIPS[request.param][0](where)
    return request.param, where


def test_clips_at_their_default_size(run: Any, clips: tuple[str, Path]) -> None:
    """All frames are in the denoiser at once, a group of them in the decoder, and the clip is whole in the end."""
    kind, folder = clips
    _, wide, (width, height, frames, group, side) = CLIPS[kind]
    found, (file,) = inspected(run, folder), (folder / "vae").glob("*.safetensors")
    last = next(x for name, x in load_file(file).items() if name.startswith("decoder.conv_out") and x.ndim == 5)
    channels = last.shape[1] * 3 // last.shape[0]
    tokens = (1 + (frames - 1) // group) * (width // side) * (height // side) + 512
    decoding = group * width * height * channels * 4 + 3 * frames * width * height
    values = max(tokens * wide * 20, decoding)
    assert found["run"]["float32"] == 4 * (found["parameters"] + values)
    assert f"for one clip of {frames} frames of {width}x{height} the larger of {tokens} tokens" in found["estimate"]


def test_its_lines(run: Any, folder: Path) -> None:
    code, out, err = run("inspect", folder)
    assert (code, err) == (0, [])
    assert out[0] == "FLUX.1: a folder in diffusers' layout"
    assert [line.split()[0] for line in out[1:6]] == ["transformer", "vae", "text_encoder", "text_encoder_2", "all"]
    assert "M parameters" in out[1]
    assert out[1].endswith("float32")
    assert out[6].startswith("memory to load: ")
    assert "an estimate (weights, and for one picture of 1024x1024" in out[7]


def test_a_file_and_a_folder_that_lack_parts(run: Any, folder: Path, tmp_path: Path) -> None:
    from calotype.denoisers.flux import FluxConfig
    from calotype.pipelines.folders import entries_of

    config = FluxConfig.from_entries(entries_of(folder / "transformer/config.json"))
    weights = in_original_layout(load_file(folder / "transformer/diffusion_pytorch_model.safetensors"), config)
    halved = {name: x.to(torch.bfloat16) if x.ndim == 2 else x for name, x in weights.items()}
    save_file(halved, tmp_path / "flux.safetensors")
    found = inspected(run, tmp_path / "flux.safetensors")
    assert (found["family"], found["others"], found["kind"]) == ("FLUX.1", ["FLUX.1 Kontext"], "a file")
    assert found["missing"][0] == "the text encoder 'clip' (encoders={'clip': folder})"
    assert found["missing"][-1] == "the autoencoder (vae=file or folder)"
    assert list(found["components"][0]["formats"]) == ["bfloat16", "float32"]
    assert inspected(run, folder / "transformer")["kind"] == "a denoiser's folder"
    code, out, _ = run("inspect", tmp_path / "flux.safetensors")
    assert code == 0
    assert out[1] == "or FLUX.1 Kontext: nothing in it tells; calotype.load(..., family=...) says which it is"
    assert "bfloat16 9" in out[2]
    assert sum(line.startswith("missing: ") for line in out) == 5
    advice = "as encoders= gives all encoders and tokenizers, as vae= the autoencoder"
    assert f"to give what is missing: a folder in diffusers' layout, or a hub id, {advice}" in out


@pytest.fixture(scope="module")
def stable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("models") / "sd"
    sd_pipeline(where)
    return where


def changed_config(part: str, **entries: object) -> Any:
    """What changes entries of a config."""

    def change(folder: Path) -> None:
        file = folder / part
        file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))

    return change


def changed_weights(change: Any) -> Any:
    """What puts the UNet's weights, changed, in their place."""

    def put(folder: Path) -> None:
        (file,) = (folder / "unet").glob("*.safetensors")
        save_file(change(load_file(file)), file)

    return put


REFUSED: dict[str, tuple[Any, str]] = {
    "a scheduler": (
        changed_config("scheduler/scheduler_config.json", _class_name="Warp"),
        "names 'Warp': supported are Euler",
    ),
    "a dtype": (
        changed_weights(lambda weights: {**weights, "conv_in.bias": weights["conv_in.bias"].to(torch.int64)}),
        "conv_in.bias is stored as torch.int64",
    ),
    "a tensor more": (changed_weights(lambda weights: {**weights, "odd": torch.zeros(2)}), "match nothing (odd)"),
    "a tensor less": (
        changed_weights(lambda weights: {name: x for name, x in weights.items() if name != "conv_out.bias"}),
        "parameters have no value (conv_out.bias)",
    ),
    "sizes": (changed_config("unet/config.json", block_out_channels=[32, 32, 64]), "misfits ("),
    "what it predicts": (changed_config("scheduler/scheduler_config.json", prediction_type="x"), "prediction_type"),
    "a text encoder": (changed_config("text_encoder/config.json", hidden_size=48), "hidden_size 48"),
}
"""What is done to a folder, and some of what is said."""


@pytest.mark.parametrize("what", REFUSED)
def test_what_load_refuses(run: Any, stable: Path, tmp_path: Path, what: str) -> None:
    """In the words of `load`, after what the folder holds."""
    change, words = REFUSED[what]
    copy = shutil.copytree(stable, tmp_path / "copy")
    change(copy)
    with pytest.raises(ValueError) as error:
        calotype.load(copy)
    said = str(error.value)
    assert words in said
    code, out, err = run("inspect", copy)
    assert (code, err) == (2, [])
    assert out[0] == "Stable Diffusion 1 or 2: a folder in diffusers' layout"
    assert f"refused: {' '.join(said.split())}" in out
    assert not any(line.startswith(("missing", "memory to run")) for line in out)
    code, out, _ = run("inspect", copy, "--json")
    assert (code, json.loads("\n".join(out))["refused"]) == (2, said)


def test_what_load_takes_is_not_refused(run: Any, stable: Path, clips: tuple[str, Path]) -> None:
    assert [inspected(run, folder)["refused"] for folder in (stable, clips[1])] == [None, None]


def test_no_weights_are_read(run: Any, stable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are made on the meta device: a weight is looked at, and never copied to memory."""
    made: list[torch.device] = []
    read = WeightSource.read

    def watched(self: WeightSource, name: str, **options: Any) -> torch.Tensor:
        weight = read(self, name, **options)
        made.append(weight.device)
        return weight

    monkeypatch.setattr(WeightSource, "read", watched)
    assert inspected(run, stable)["refused"] is None
    assert set(made) == {torch.device("meta")}


def test_language_models_and_plate(run: Any, llama_folder: Path, model: Path) -> None:
    found = inspected(run, llama_folder)
    assert found["kind"] == "a language model's folder"
    assert found["family"] == "language model of 2 layers, 32 wide"
    cached = 2 * 2 * 2 * 8 * 512  # keys and values, layers, heads, width of a head, tokens
    weights = found["parameters"]
    assert found["run"] == {"float32": 4 * (weights + cached), "bfloat16": 2 * (weights + cached)}
    plate = inspected(run, model)
    assert plate["family"] == "plate"
    assert [part["name"] for part in plate["components"]] == ["denoiser", "language", "vae"]
    assert plate["run"] == {}


def test_what_is_no_model(fails: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "cut.safetensors").write_bytes(b"\x20" + bytes(7) + b'{"a": ')
    assert "a .txt file" in fails("inspect", tmp_path / "notes.txt")
    assert "is truncated" in fails("inspect", tmp_path / "cut.safetensors")
    assert "a folder without a config.json" in fails("inspect", tmp_path)
    assert "no file or folder 'nowhere'" in fails("inspect", "nowhere")
    save_file(
        {"decoder.conv_in.weight": torch.zeros(1), "encoder.conv_in.weight": torch.zeros(1)},
        tmp_path / "ae.safetensors",
    )
    assert "it looks like an autoencoder alone" in fails("inspect", tmp_path / "ae.safetensors")
