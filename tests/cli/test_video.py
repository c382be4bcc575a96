"""`calotype video`, and `calotype replay` of clips."""

import errno
import os
from pathlib import Path

import numpy
import pytest
from fakes import fake_clip_pipeline, fake_pipeline
from PIL import Image

from calotype.cli import build_parser, video
from calotype.pipelines.clips import read_clip, save_clip
from calotype.pipelines.files import open_image, read_manifest


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models by name: one that makes clips, one that makes pictures."""
    models = {"clips": fake_clip_pipeline, "fake": fake_clip_pipeline, "pictures": fake_pipeline}
    for module in ("load", "replay"):
        monkeypatch.setattr(f"calotype.pipelines.{module}.load", lambda source, **_: models[source]())


def test_one_clip(run):
    code, out, err = run("video", "a", "fox", "--model", "clips", "--seed", "7", "--size", "48x32", "-o", "fox.mp4")
    assert (code, err, os.listdir()) == (0, [], ["fox.mp4"])
    assert out[0].startswith("fox.mp4  (seed 7, ") and out[0].endswith(" s)")
    clip, manifest = read_clip("fox.mp4"), read_manifest("fox.mp4")
    assert clip.frames.shape == (3, 32, 48, 3) and clip.fps == 8
    assert (manifest.prompt, manifest.seed, manifest.task) == ("a fox", 7, "text-to-video")


def test_every_option_arrives(run):
    options = "--frames 5 --fps 12.5 --steps 3 --guidance 1.5 --sampler heun --negative foxes --codec vp9 --seed 9"
    assert run("video", "a fox", "--model", "clips", *options.split(), "-o", "fox.mp4")[0] == 0
    clip, manifest = read_clip("fox.mp4"), read_manifest("fox.mp4")
    assert clip.frames.shape[0] == 5 and clip.fps == 12.5
    assert manifest.num_inference_steps == 3 and manifest.guidance["scale"] == 1.5 and manifest.seed == 9
    assert manifest.sampler["type"] == "Heun" and manifest.negative_prompts == ("foxes",)


def test_several_clips_frames_in_files_and_a_sheet(run):
    options = ("--model", "clips", "--count", "2", "--seed", "3", "--sheet", "sheet.png")
    code, out, _ = run("video", "a fox", *options, "-o", "fox.png")
    frames = [f"fox-{clip}-{frame}.png" for clip in (1, 2) for frame in (1, 2, 3)]
    assert code == 0 and sorted(os.listdir()) == [*frames, "sheet.png"]
    assert [line.split(",")[0] for line in out] == [
        "fox-1-1.png to fox-1-3.png  (seed 3",
        "fox-2-1.png to fox-2-3.png  (seed 4",
        "sheet.png",
    ]
    assert open_image("sheet.png").size == (3 * 36 - 4, 68)
    assert read_clip("fox-2.png").frames.shape == (3, 32, 32, 3) and read_manifest("fox-2.png").seed == 4


def test_default_names_come_from_the_prompt(run):
    options = ("--model", "clips", "--seed", "0")
    assert run("video", "a fox!", *options)[1][0].startswith("a-fox.mp4  ")
    assert run("video", "a fox", *options)[1][0].startswith("a-fox-2.mp4  ")
    several = (*options, "--count", "2")
    names = [line.split()[0] for _ in range(2) for line in run("video", "a fox", *several)[1]]
    assert names == ["a-fox-2-1.mp4", "a-fox-2-2.mp4", "a-fox-3-1.mp4", "a-fox-3-2.mp4"]
    assert len(os.listdir()) == 6


@pytest.mark.parametrize(("given", "fps"), [([], 24), (["--fps", "12"], 12)])
def test_the_speed_of_a_clip_that_is_given_stays(given, fps):
    save_clip(numpy.zeros((3, 32, 32, 3), numpy.uint8), "in.webm", fps=24)
    options = build_parser().parse_args(["video", "a fox", "--video", "in.webm", *given])
    assert video._own_arguments(options)["video"].shape == (3, 32, 32, 3)
    assert options.fps == fps


def test_a_place_of_a_frame_that_is_taken_is_told_before_the_run(fails):
    Path("fox-2.png").mkdir()
    assert "fox-2.png: exists and is not a file" in fails("video", "a fox", "--model", "clips", "-o", "fox.png")
    assert os.listdir() == ["fox-2.png"]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_too_little_memory_is_one_line(fails, monkeypatch: pytest.MonkeyPatch, error: Exception):
    def load(source, **_):
        raise error

    monkeypatch.setattr("calotype.pipelines.load.load", load)
    assert "there is not enough memory for this" in fails("video", "a fox", "--model", "clips", "-o", "fox.mp4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-o s.webp --sheet s.webp", "--sheet s.webp would take the place of the clip"),
        ("-o s.png --sheet s-2.png", "--sheet s-2.png would take the place of the clip or of one of its frames"),
        ("-o s.webp --count 2 --sheet s-2.webp", "--sheet s-2.webp would take the place"),
        ("-o a.mp4 --condition a.png@-1", "--condition a.png@-1: no such file; what it shows is said as FILE@FRAME"),
        ("-o fox.avi", "fox.avi: extension '.avi' is unknown; allowed are .mp4, .webm, .gif, .webp, .png"),
        ("-o fox.mp4 --codec mpeg2", "codec 'mpeg2' is unknown for mp4; allowed are h264, vp9"),
        ("-o fox.mp4 --fps 0", "fps is 0.0; for .mp4 it must be from 0.1 to 240"),
        ("-o fox.gif --fps 60", "fps is 60.0; for .gif it must be from 0.1 to 50"),
        ("-o none/fox.mp4", "none: no such folder to write to"),
        ("-o /proc/fox.mp4", "/proc: cannot write to this folder"),
        ("--sheet sheet.mp4", "sheet.mp4: extension '.mp4' is unknown; allowed are .png"),
        ("--frames 0", "'0' is not a whole number from 1 up"),
        ("--image none.png", "none.png: no such file"),
        ("--last-image none.png", "none.png: no such file"),
        ("--count 1000000", "--count is 1000000; it must be from 1 to 1000"),
        ("--sampler best", "unknown sampler 'best'"),
        ("--video none.mp4", "none.mp4: no such file"),
        ("--mask a.png", "unrecognized arguments: --mask a.png"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_loaded(fails, monkeypatch, options: str, message: str):
    monkeypatch.delattr("calotype.pipelines.load.load")
    assert message in fails("video", "a fox", "--model", "clips", *options.split())


def test_models_that_do_not_make_it(fails, model: Path, monkeypatch: pytest.MonkeyPatch):
    said = fails("video", "a fox", "--model", "pictures", "-o", "fox.mp4")
    assert said == "fake makes pictures, not clips: give --model one that does, such as Wan 2.1"
    assert fails("image", "a fox", "--model", "clips") == "fake makes clips, not pictures: use calotype video"
    Image.new("RGB", (32, 32)).save("../end.png")
    assert "last_image: fake does not use this argument" in fails(
        "video", "a fox", "--model", "clips", "--last-image", "../end.png"
    )


def test_full_disk(fails, monkeypatch: pytest.MonkeyPatch):
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    for name in ("fox.mp4", "fox.gif"):
        said = fails("video", "a fox", "--model", "clips", "-o", name)
        assert said == f"{name}: No space left on device"


def test_replay_says_whether_the_frames_are_equal(run):
    for name in ("fox.mp4", "fox.webp", "fox.png"):
        run("video", "a fox", "--model", "clips", "--seed", "7", "-o", name)
    code, out, err = run("replay", "fox.mp4")
    assert code == 0 and err == [
        "calotype: warning: .mp4 is lossy: frames in the file differ from those that were made"
    ]
    assert out[0].startswith(
        "fox.mp4: the frames are bit-equal to those that were made; those in this lossy file differ from them by up to "
    )
    for name in ("fox.webp", "fox.png"):
        code, out, err = run("replay", name)
        assert (code, err) == (0, []) and out[0].startswith(f"{name}: bit-equal  (seed 7, ")


def test_replay_writes_clips_and_tells_changed_ones(run, fails):
    run("video", "a fox", "--model", "clips", "--seed", "7", "-o", "fox.webp")
    code, out, _ = run("replay", "fox.webp", "-o", "again.webm")
    assert (code, out[0]) == (0, "again.webm")
    assert read_manifest("again.webm") == read_manifest("fox.webp") and read_clip("again.webm").fps == 8
    assert "extension '.jpg' is unknown" in fails("replay", "fox.webp", "-o", "again.jpg")
    frames = read_clip("fox.webp").frames.copy()
    frames[2, 3, 4] ^= 128
    save_clip(frames, "changed.webp", fps=8, manifest=read_manifest("fox.webp"))
    code, out, _ = run("replay", "changed.webp")
    assert code == 1 and out[0].startswith("changed.webp: different, by up to 128 of 255  (")
    assert numpy.array_equal(read_clip("changed.webp").frames, frames)
