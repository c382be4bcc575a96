"""The commands as a newcomer types them, on the bundled model."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import calotype
from calotype.pipelines import load as loading
from calotype.pipelines.files import open_image, read_manifest


def test_image_then_replay(run):
    code, out, err = run("image", "a fox on a beach", "--seed", "7", "-o", "fox.png")
    assert (code, err) == (0, []) and out[0].startswith("fox.png  (seed 7, ")
    manifest = read_manifest("fox.png")
    assert (manifest.model, manifest.width, manifest.height) == ("plate", 128, 128)
    assert set(manifest.weights) >= {"denoiser.safetensors", "vae.safetensors", "language.safetensors"}
    pixels = numpy.asarray(open_image("fox.png"), float)
    assert pixels.shape == (128, 128, 3) and pixels.std() > 10
    code, out, err = run("replay", "fox.png")
    assert (code, err) == (0, []) and "bit-equal" in out[0]


def test_video_then_replay(run):
    code, out, err = run("video", "a frog jumps up on a green field", "--seed", "7", "-o", "frog.mp4")
    assert (code, err) == (0, []) and out[0].startswith("frog.mp4  (seed 7, ")
    clip = calotype.read_clip("frog.mp4")
    assert clip.frames.shape == (17, 128, 128, 3) and clip.fps == 16
    first, last = (clip.frames[n].astype(float) for n in (0, -1))
    assert first.std() > 10 and abs(first - last).mean() > 5
    code, out, err = run("replay", "frog.mp4")
    assert code == 0 and "bit-equal" in out[0]
    assert len(err) == 1 and ".mp4 is lossy" in err[0]


def test_batches_replay_bit_equal(run):
    assert run("image", "two cats", "--seed", "1", "--count", "2", "--steps", "3", "-o", "cats.png")[0] == 0
    assert run("image", "a fox", "--seed", "1", "--count", "3", "--steps", "2", "--grid", "-o", "grid.webp")[0] == 0
    assert run("replay", "cats-2.png")[0] == 0
    assert run("replay", "grid.webp")[0] == 0


def test_a_fresh_process_makes_the_same_picture(run):
    command = [sys.executable, "-m", "calotype", "image", "a", "fox", "--seed", "3", "--steps", "2", "-o", "new.png"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("new.png  (seed 3, ") and done.stderr == ""
    assert run("image", "a fox", "--seed", "3", "--steps", "2", "-o", "here.png")[0] == 0
    assert open_image("new.png").tobytes() == open_image("here.png").tobytes()


def test_text(run):
    code, out, _ = run("text", "a cat on")
    assert code == 0 and len(out) == 1 and out[0].startswith("a cat on") and len(out[0]) > len("a cat on")
    code, out, _ = run("text", "fox", "--expand")
    assert code == 0 and "fox" in out[0]


def test_models_and_doctor(run):
    code, out, _ = run("models")
    assert code == 0 and sum("M parameters" in line for line in out) == 3
    code, out, _ = run("doctor")
    assert code == 0 and sum("sha256" in line for line in out) == 5


def test_corrupted_weights(fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = shutil.copytree(loading.bundled_folder(), tmp_path / "assets")
    with (folder / "denoiser.safetensors").open("r+b") as file:
        file.truncate(os.path.getsize(folder / "denoiser.safetensors") // 2)
    monkeypatch.setattr("calotype.pipelines.load.bundled_folder", lambda: folder)
    assert "denoiser.safetensors is truncated" in fails("image", "a fox", "-o", "fox.png")
