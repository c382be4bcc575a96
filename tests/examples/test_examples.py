"""Every example runs, on the bundled model, and writes what it says."""

import runpy
import sys
from pathlib import Path

import pytest

from calotype.pipelines.files import open_image

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = {
    "batch_with_seeds.py": {"batch-1.png", "batch-2.png", "batch-3.png", "batch-4.png", "sheet.png"},
    "complete_prompt.py": {"prompts.txt"},
    "image_to_image.py": {"start.png", "strength-0.0.png", "strength-0.5.png", "strength-0.8.png"},
    "inpaint.py": {"after.png", "before.png", "mask.png"},
    "resume_elsewhere.py": {"car.png", "state.safetensors"},
    "serve_requests.py": {"answers.txt"},
    "stream_steps.py": {"car.png", "state.safetensors", *(f"preview-{i}.png" for i in range(4))},
    "structured_output.py": {"answer.json"},
    "text_to_image.py": {"fox.png"},
    "text_to_video.py": {"frames.png", "frog.mp4"},
}


def test_every_example_is_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(FILES)


@pytest.mark.parametrize("name", sorted(FILES))
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", [name, "-o", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert {path.name for path in tmp_path.iterdir()} == FILES[name]
    assert capsys.readouterr().out
    for path in tmp_path.glob("*.png"):
        assert min(open_image(path).size) >= 128
