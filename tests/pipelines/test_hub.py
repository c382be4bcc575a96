"""Picture models from the hub, which is played."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import calotype

from ..fake_hub import Hub
from ..tiny_flux import flux_pipeline

ENDLESS = 10_000_000_000
OTHERS = {
    "flux1-dev.safetensors": ENDLESS,
    "ae.safetensors": ENDLESS,
    "README.md": 10,
    "text_encoder/pytorch_model.bin": ENDLESS,
    "text_encoder/model.fp16.safetensors": ENDLESS,
    "transformer/diffusion_pytorch_model.bf16.safetensors": ENDLESS,
    "safety_checker/model.safetensors": ENDLESS,
}
RUN: dict[str, Any] = {"prompt": "a cat", "height": 16, "width": 16, "num_inference_steps": 1, "max_sequence_length": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("hub") / "model"
    flux_pipeline(False, where)
    return where


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return Hub(monkeypatch, folder, {**files, **OTHERS})


def wanted(hub: Hub) -> set[str]:
    """What was asked for at last."""
    return set(hub.asked[-1]["allow_patterns"])


def test_only_components_are_downloaded(hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = calotype.load("owner/name", revision="main", token="secret")
    assert pipe.source.name == "owner/name"
    size = sum(hub.files[name] for name in wanted(hub))
    assert wanted(hub) == set(hub.files) - set(OTHERS)
    assert capsys.readouterr().err == f"downloading owner/name: {len(wanted(hub))} files, {size / 1e9:.2f} GB\n"
    assert {asked["token"] for asked in hub.asked} == {"secret"}
    assert torch.equal(pipe(**RUN, seed=1).latents, calotype.load(folder)(**RUN, seed=1).latents)


def test_what_is_given_is_not_downloaded(hub: Hub, folder: Path) -> None:
    calotype.load("owner/name", denoiser=folder / "transformer", encoders={"t5": folder / "text_encoder_2"})
    folders = {name.partition("/")[0] for name in wanted(hub)}
    assert folders == {"model_index.json", "text_encoder", "tokenizer", "tokenizer_2", "vae", "scheduler"}


def test_parts_from_the_hub(hub: Hub, folder: Path) -> None:
    file = folder / "transformer/diffusion_pytorch_model.safetensors"
    with pytest.raises(ValueError, match=r"heads are 16 wide; which rotary axes they have is known for 128 only"):
        calotype.load(file, encoders="owner/name", vae="owner/name")
    fetched = [{name.partition("/")[0] for name in asked["allow_patterns"]} for asked in hub.asked]
    assert {"model_index.json", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"} in fetched
    assert {"model_index.json", "vae"} in fetched


def test_of_tokenizers_nothing_else_is_downloaded(hub: Hub, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"missing are the text encoder 'clip'"):
        calotype.load(folder / "transformer", tokenizers="owner/name")
    folders = {name.partition("/")[0] for name in wanted(hub)}
    assert folders == {"model_index.json", "tokenizer", "tokenizer_2"}


def test_a_variant_is_picked(hub: Hub) -> None:
    with pytest.raises(ValueError, match="'owner/name' has no variant 'fp8' of its weights"):
        calotype.load("owner/name", variant="fp8")
    with pytest.raises(FileNotFoundError, match="has a variant 'fp16'"):  # which the play's folder lacks
        calotype.load("owner/name", variant="fp16")
    assert "text_encoder/model.fp16.safetensors" in wanted(hub)
    assert "text_encoder/model.safetensors" not in wanted(hub)
    assert "text_encoder_2/model.safetensors" in wanted(hub)


def test_repositories_of_other_kinds(hub: Hub, folder: Path, tmp_path: Path) -> None:
    whole = dict(hub.files)
    hub.files = {"flux1-dev-Q4_0.gguf": ENDLESS, "README.md": 3}
    with pytest.raises(ValueError, match=r"no model_index.json\); it holds flux1-dev-Q4_0.gguf: download a file"):
        calotype.load("owner/name")
    hub.files = {name: size for name, size in whole.items() if not name.startswith("vae/")}
    with pytest.raises(ValueError, match=r"'owner/name' has no folder 'vae', a part that FLUX.1 needs"):
        calotype.load("owner/name")
    hub.folder = tmp_path
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "KolorsPipeline"}))
    hub.files = {"model_index.json": 10}
    with pytest.raises(ValueError, match=r"of diffusers' KolorsPipeline, which needs .*; supported are FLUX"):
        calotype.load("owner/name")
    assert all(asked["allow_patterns"] == ["model_index.json"] for asked in hub.asked[-1:])


def test_offline(hub: Hub, folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not downloaded yet, and local_files_only is set; nor is there a file"):
        calotype.load("owner/name", local_files_only=True)
    hub.cached = set(hub.files)
    assert calotype.load("owner/name", local_files_only=True).source.name == "owner/name"
    hub.error = ConnectionError("no route")
    assert calotype.load("owner/name").source.name == "owner/name"
    assert all(asked.get("local_files_only") for asked in hub.asked)


def test_what_looks_local_is_never_downloaded(hub: Hub) -> None:
    local = ("./no/such/folder", "../owner/name", "~/owner/name", "owner/name/", "models/flux.sft", "models/flux.GGUF")
    for source in (*local, "./owner/name", "/no/such", "a/b/c", "name", "owner/model.gguf"):
        with pytest.raises(FileNotFoundError, match="not a hub id such as 'owner/name'; supported today are 'plate'"):
            calotype.load(source)
    with pytest.raises(FileNotFoundError, match="if a hub id is meant, give 'owner/name', a string"):
        calotype.load(Path("owner/name"))
    assert hub.asked == []
