"""Options of `calotype image` and `calotype video` for models whose parts lie in several places."""

from pathlib import Path
from typing import Any

import pytest

from calotype.pipelines.files import read_manifest

from ..tiny_flux import flux_pipeline

ASKED = ("--seed", "3", "--size", "24x40", "--steps", "1", "-o", "a.png")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("models") / "flux"
    flux_pipeline(True, where)
    return where


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `load` was asked for; it loads nothing."""
    from calotype.pipelines import load

    asked: list[dict[str, Any]] = []

    def refuse(source: object, **options: Any) -> None:
        asked.append({"source": source, **options})
        raise ValueError("not loaded")

    monkeypatch.setattr(load, "load", refuse)
    return asked


def test_parts_from_elsewhere(run: Any, folder: Path) -> None:
    """A denoiser alone becomes the picture that the whole folder makes."""
    assert run("image", "a cat", "--model", folder, *ASKED)[0] == 0
    whole = Path("a.png").read_bytes()
    parts = ("--encoders", folder, "--tokenizers", folder, "--vae", folder / "vae", "--offload", "blocks")
    code, _, err = run("image", "a cat", "--model", folder / "transformer", *parts, *ASKED)
    assert (code, err) == (0, [])
    assert read_manifest("a.png").seed == 3
    assert pixels(Path("a.png").read_bytes()) == pixels(whole)


def pixels(png: bytes) -> bytes:
    from io import BytesIO

    from PIL import Image

    return Image.open(BytesIO(png)).tobytes()


def test_true_guidance(run: Any, folder: Path) -> None:
    """It is told to the model, and has no effect without a negative prompt."""
    options = ("image", "a cat", "--model", folder, "--true-cfg", "2.5", *ASKED)
    assert run(*options)[2] == ["calotype: warning: true_cfg_scale has no effect without a negative_prompt"]
    code, _, err = run(*options, "--negative", "a dog")
    assert (code, err) == (0, [])
    assert read_manifest("a.png").guidance["then"]["scale"] == 2.5


@pytest.mark.parametrize("command", ["image", "video"])
def test_what_load_is_asked_for(fails: Any, calls: list[dict[str, Any]], command: str) -> None:
    parts = ("--encoders", "a", "--vae", "b.safetensors", "--tokenizers", "c", "--offload", "encoders")
    parts += ("--variant", "fp16")
    assert fails(command, "a cat", "--model", "m.safetensors", *parts) == "not loaded"
    wanted = {"source": "m.safetensors", "encoders": "a", "vae": "b.safetensors", "tokenizers": "c", "variant": "fp16"}
    assert calls == [{**wanted, "offload": "encoders", "device": None, "dtype": None}]
