"""`calotype doctor` and `calotype models`, on a model that is whole and on damaged ones."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from calotype.core.attention.registry import all_backends
from calotype.core.checkpoint import file_digest
from calotype.core.ops.kernels import IS_BUILT


@pytest.fixture
def bundled(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the tiny model in the bundled one's place, digests on record, with a card."""
    folder = tmp_path / "plate" / "assets"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["sha256"] = {path.name: file_digest(path) for path in folder.glob("*.safetensors")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder.parent / "MODEL_CARD.md").write_text("# plate\n\n| test | right |\n|---|---|\n| one object | 99 % |\n")
    monkeypatch.setattr("calotype.pipelines.load.bundled_folder", lambda: folder)
    return folder


def test_doctor_says_what_is_here(run, bundled: Path):
    threads = torch.get_num_threads()
    code, out, err = run("doctor", "--threads", "1")
    torch.set_num_threads(threads)
    text = "\n".join(out)
    assert (code, err) == (0, [])
    for heading in ("versions:", "devices:", "attention:", "dtype:", "bundled model:"):
        assert heading in out
    assert f"  torch {torch.__version__}" in out and ", 1 threads in use" in text
    assert "  sdpa: works on " in text and all(f"  {backend.name}: " in text for backend in all_backends())
    assert f"  calotype's kernels: {'built' if IS_BUILT else 'not built'}" in text
    assert "GFLOP/s" in text and "advice: " in text
    assert text.count("as on record") == 3


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "config"])
def test_doctor_finds_damage(run, bundled: Path, damage: str):
    path = bundled / ("config.json" if damage == "config" else "vae.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage in ("cut", "config") else content)
    code, out, _ = run("doctor")
    line = next(line for line in out if line.startswith(f"  {path.name}: "))
    expected = {"missing": "missing", "config": "not a config", "cut": "is truncated"}
    assert code == 1 and expected.get(damage, "is damaged: its sha256") in line


def test_models_prints_sizes_recipe_and_card(run, bundled: Path):
    code, out, err = run("models")
    text = "\n".join(out)
    assert (code, err) == (0, []) and out[0].startswith("plate (bundled)")
    denoiser = next(line for line in out if line.split()[:1] == ["denoiser"])
    assert "M parameters" in denoiser and denoiser.endswith("float32")
    assert "num inference steps    3" in text and "| one object | 99 % |" in text and "a folder" in text


def test_models_without_weights_is_an_error(fails, bundled: Path):
    (bundled / "config.json").unlink()
    assert "config.json" in fails("models")
