"""The benchmarks run on stand-ins for the bundled model, and print what they promise."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from calotype.plate.training import evaluate, scenes
from calotype.plate.training.motions import render_clip

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Perfect:
    """Draws the true scene of a test caption, and nothing with guidance 1."""

    def __init__(self, share):
        self.truth = {c.sample.caption: scenes.render(c.sample.scene) for c in evaluate.held_out_cases(share)}

    def __call__(self, prompt, *, num_inference_steps, guidance_scale, seed, output_type):
        images = np.stack([self.truth[text] for text in prompt]) / np.float32(255)

        class Result:
            pass

        Result.images = images if guidance_scale > 1 else np.zeros_like(images)
        return Result


def test_quality_prints_and_writes_every_setting(tmp_path, capsys):
    quality = load("quality")
    arguments = ["--share", "0.01", "--steps", "10", "4", "--guidance", "3", "1"]
    files = ["--json", str(tmp_path / "q.json"), "--sheet", str(tmp_path / "q.png")]
    quality.main([*arguments, *files], Perfect(0.01))
    report = json.loads((tmp_path / "q.json").read_text())
    assert [(r["steps"], r["guidance"]) for r in report] == [(10, 3), (4, 3), (10, 1)]
    assert [r["groups"][-1]["share"] for r in report] == [1, 1, 0]
    assert "three in a row" in capsys.readouterr().out
    assert (tmp_path / "q.png").stat().st_size > 1000


def test_quality_of_one_setting_runs_once():
    quality = load("quality")
    options = quality.parse(["--share", "0.01", "--steps", "10", "--guidance", "3"])
    assert [(n, w) for n, w, _ in quality.runs(options)] == [(10, 3)]


def test_clips_judges_what_a_pipeline_makes(tmp_path, capsys):
    clips = load("clips")
    truth = {
        clip.caption: render_clip(clip)
        for kind, count in clips.COUNTS.items()
        for clip in clips.held_out_clips(kind, max(1, round(count * 0.01)), 2024)
    }

    class Result:
        def __init__(self, prompts, guidance):
            frames = [truth[prompt] for prompt in prompts]
            self.frames = frames if guidance > 1 else [each[::-1].copy() for each in frames]

        def clips(self):
            return self.frames

    def pipe(prompt, *, num_frames, num_inference_steps, guidance_scale, seed, output_type, progress):
        assert num_frames == 17 and len(seed) == len(prompt)
        return Result(prompt, guidance_scale)

    files = ["--json", str(tmp_path / "c.json"), "--sheet", str(tmp_path / "c.png")]
    clips.main(["--share", "0.01", *files], pipe)
    report = json.loads((tmp_path / "c.json").read_text())
    assert all(report["one"]["right"]) and len(report["one"]["right"]) == 2 and all(report["two"]["right"])
    assert (tmp_path / "c.png").stat().st_size > 1000
    assert "right 100.0%" in capsys.readouterr().out
    clips.main(["--share", "0.01", "--kinds", "two", "--guidance", "1"], pipe)
    assert "motion 0.0%" in capsys.readouterr().out


def test_plate_prints_medians(tmp_path, monkeypatch, capsys):
    plate = load("plate")
    runs = iter([dict.fromkeys(plate.ROWS, float(n)) for n in (3, 1, 2)])
    monkeypatch.setattr(plate, "run_fresh", lambda options: next(runs))
    plate.main(["--repeats", "3", "--json", str(tmp_path / "p.json")])
    assert set(json.loads((tmp_path / "p.json").read_text())["medians"].values()) == {2.0}
    assert "peak memory" in capsys.readouterr().out


@pytest.mark.parametrize("clips", [False, True])
def test_plate_measures_a_pipeline(monkeypatch, clips):
    import calotype
    from calotype.vae.plate import PlateClipVAE, PlateClipVAEConfig

    class Pipe:
        vae = PlateClipVAE(PlateClipVAEConfig()) if clips else None

        def __call__(self, prompt, *, num_inference_steps, seed, progress, num_frames=1):
            for _ in self.stream(prompt, num_inference_steps=num_inference_steps, seed=seed):
                pass

        def stream(self, prompt, *, num_inference_steps, seed):
            for _ in range(num_inference_steps):
                yield torch.mm(torch.ones(8, 8), torch.ones(8, 8))

    monkeypatch.setattr(calotype, "load", lambda source: Pipe(), raising=False)
    plate = load("plate")
    figures = plate.measure(plate.parse(["--steps", "3"]))
    of_clips = set() if clips else {"clip_s", "cold_clip_s"}
    assert {*figures, "cold_s", *["cold_clip_s"] * clips} == set(plate.ROWS) - of_clips
    assert figures["gflop"] == pytest.approx(2 * 8**3 / 1e9)
    assert figures["floor_s"] > 0
    assert figures["peak_mb"] > 50


def test_plate_times_the_command(monkeypatch):
    plate = load("plate")
    commands = []
    monkeypatch.setattr(plate.subprocess, "run", lambda command, **options: commands.append(command))
    options = plate.parse(["--steps", "3", "--threads", "1", "--model", "x"])
    assert plate.cold_start(options, "video", plate.CLIP_PROMPT, "clip.mp4") >= 0
    assert commands[0][1:5] == ["-m", "calotype", "video", plate.CLIP_PROMPT]
    assert commands[0][-6:] == ["--steps", "3", "--model", "x", "--threads", "1"]


def test_plate_passes_on_the_error_of_a_repeat(monkeypatch):
    plate = load("plate")
    options = plate.parse(["--model", "no-such-model-anywhere"])
    with pytest.raises(SystemExit, match="no-such-model-anywhere"):
        plate.run_fresh(options)
