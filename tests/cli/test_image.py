"""`calotype image`: files, names, messages."""

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from calotype.denoisers.plate import PlateDenoiser
from calotype.pipelines.files import open_image, read_manifest


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A picture to start from."""
    values = numpy.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=numpy.uint8)
    Image.fromarray(values).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.fixture
def mask(tmp_path: Path) -> Path:
    """White on the left half."""
    values = numpy.zeros((32, 48), numpy.uint8)
    values[:, :24] = 255
    Image.fromarray(values).save(tmp_path / "mask.png")
    return tmp_path / "mask.png"


def test_one_picture(run, model: Path):
    code, out, err = run("image", "a", "fox", "--model", model, "--seed", "7", "--size", "48x32", "-o", "fox.png")
    assert (code, err) == (0, [])
    assert out[0].startswith("fox.png  (seed 7, ") and out[0].endswith(" s)")
    manifest = read_manifest("fox.png")
    assert (manifest.prompt, manifest.seed, manifest.width, manifest.height) == ("a fox", 7, 48, 32)
    assert open_image("fox.png").size == (48, 32)
    assert os.listdir() == ["fox.png"]


def test_every_option_arrives(run, model: Path):
    options = [
        "--negative",
        "two-foxes",
        "--steps",
        "3",
        "--guidance",
        "1.5",
        "--sampler",
        "heun",
        "--seed",
        "9",
        "--dtype",
        "float32",
        "--device",
        "cpu",
    ]
    assert run("image", "a fox", "--model", model, *options, "-o", "fox.webp")[0] == 0
    manifest = read_manifest("fox.webp")
    assert manifest.negative_prompts == ("two-foxes",) and manifest.num_inference_steps == 3
    assert manifest.guidance["scale"] == 1.5 and manifest.sampler["type"] == "Heun" and manifest.seed == 9


def test_default_names_come_from_the_prompt_and_overwrite_nothing(run, model: Path):
    options = ("--model", model, "--steps", "1", "--seed", "0")
    assert run("image", "A fox, on/a BEACH!", *options)[1][0].startswith("a-fox-on-a-beach.png  ")
    assert run("image", "a fox on a beach", *options)[1][0].startswith("a-fox-on-a-beach-2.png  ")
    out = run("image", "a fox on a beach", "--count", "2", *options)[1]
    assert [line.split("  ")[0] for line in out] == ["a-fox-on-a-beach-3.png", "a-fox-on-a-beach-4.png"]
    assert run("image", "!?", *options)[1][0].startswith("image.png  ")
    Path("folder").mkdir()
    assert run("image", "é" * 200, "-o", "folder", *options)[1][0].startswith("folder/" + "é" * 60 + ".png")


def test_the_named_output_is_replaced(run, model: Path):
    Path("fox.png").write_text("old")
    assert run("image", "a fox", "--model", model, "-o", "fox.png")[0] == 0
    assert open_image("fox.png").size == (32, 32)


def test_count_numbers_files_and_seeds(run, model: Path):
    code, out, _ = run("image", "a fox", "--model", model, "--count", "3", "--seed", "7", "-o", "fox.jpg")
    assert code == 0 and [line.split(",")[0] for line in out] == [f"fox-{n}.jpg  (seed {6 + n}" for n in (1, 2, 3)]
    assert [read_manifest(f"fox-{n}.jpg").seed for n in (1, 2, 3)] == [7, 8, 9]


def test_grid_is_one_file(run, model: Path):
    code, out, _ = run("image", "a fox", "--model", model, "--count", "3", "--grid", "--seed", "7", "-o", "fox.png")
    assert code == 0 and len(out) == 1 and out[0].startswith("fox.png  (seed 7, 8, 9, ")
    assert open_image("fox.png").size == (68, 68) and read_manifest("fox.png").seeds == (7, 8, 9)


def test_from_a_picture_and_a_mask(run, model: Path, photo: Path, mask: Path):
    common = ("image", "a fox", "--model", model, "--seed", "1", "--image", photo)
    assert run(*common, "--strength", "0.5", "-o", "a.png")[0] == 0
    assert run(*common, "--mask", mask, "-o", "b.png")[0] == 0
    assert (read_manifest("a.png").task, read_manifest("a.png").strength) == ("image-to-image", 0.5)
    assert read_manifest("b.png").task == "inpaint"
    after, before = numpy.asarray(open_image("b.png")), numpy.asarray(open_image(photo))
    assert numpy.array_equal(after[:, 24:], before[:, 24:]) and not numpy.array_equal(after[:, :24], before[:, :24])


def test_several_pictures(run, fails, model: Path, photo: Path, mask: Path):
    """In their order: one for each picture that is made, where the model starts from them."""
    common = ("image", "a fox", "--model", model, "--seed", "1", "--strength", "0")
    assert run(*common, "--count", "2", "--image", photo, "--image", mask, "-o", "a.png")[0] == 0
    for file, start in (("a-1.png", photo), ("a-2.png", mask)):
        assert run(*common, "--image", start, "-o", "b.png")[0] == 0
        assert numpy.array_equal(numpy.asarray(open_image(file)), numpy.asarray(open_image("b.png")))
    assert "image holds 2 pictures for 1 prompts" in fails(*common, "--image", photo, "--image", mask, "-o", "c.png")


def test_warnings_go_to_stderr(run, model: Path):
    code, out, err = run("image", "a fox", "--model", model, "--negative", "x", "--guidance", "1", "-o", "a.png")
    assert code == 0 and len(out) == 1
    assert err == ["calotype: warning: negative_prompt has no effect: this guidance makes no unconditional pass"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--size 100", "width is 100; it must be a multiple of 16, such as 96 or 112"),
        ("--size 128x1000", "height is 1000; it must be from 32 to 512"),
        ("--size big", "'big' is not a size: expected pixels as 128, or WIDTHxHEIGHT as 128x160"),
        ("--steps 0", "num_inference_steps is 0; it must be from 1 to 1000"),
        ("--count 1000000", "--count is 1000000; it must be from 1 to 1000"),
        ("--threads 100000", "threads is 100000; it must be from 1 to 1024"),
        ("--device meta", "device is 'meta'"),
        ("--steps -1", "num_inference_steps is -1; it must be from 1 to 1000"),
        ("--steps many", "invalid int value: 'many'"),
        ("--guidance nan", "guidance_scale is nan"),
        ("--seed -1", "seed is -1"),
        ("--count 0", "'0' is not a whole number from 1 up"),
        ("--strength 0.5", "strength: it needs an image"),
        ("--sampler best", "unknown sampler 'best': known are euler, heun"),
        ("--mask m.png", "--mask says where --image may change: give --image too"),
        ("--image none.png", "none.png: no such file"),
        ("--device tpu", "tpu"),
        ("--encoders other", "encoders: "),
        ("--vae other", "vae: "),
        ("--tokenizers other", "tokenizers: "),
        ("--offload blocks", "offload: "),
        ("--offload some", "--offload: invalid choice: 'some'"),
        ("--true-cfg 2", "true_cfg_scale: plate does not use this argument"),
        ("--true-cfg many", "invalid float value: 'many'"),
        ("--dtype int3", "int3"),
        ("--colour red", "unrecognized arguments: --colour red"),
        ("-o fox.gif", "fox.gif: extension '.gif' is unknown; allowed are .png, .jpg, .jpeg, .webp"),
        ("-o none/fox.png", "none: no such folder to write to"),
        ("-o /proc/fox.png", "/proc: cannot write to this folder"),
        ("-o /dev/full", "/dev/full: extension '' is unknown"),
    ],
)
def test_mistakes_are_one_line(fails, model: Path, options: str, message: str):
    assert message in fails("image", "a fox", "--model", model, *options.split())


def test_more_mistakes(fails, model: Path, photo: Path, mask: Path, tmp_path: Path):
    Image.open(mask).crop((0, 0, 16, 16)).save(tmp_path / "small.png")
    Image.open(photo).crop((0, 0, 20, 20)).save(tmp_path / "odd.png")
    (tmp_path / "text.png").write_text("not a picture")
    start = ("image", "a fox", "--model", model)
    assert "must be from 0 to 1" in fails(*start, "--image", photo, "--strength", "1.5")
    assert "mask_image is 16x16 and image is 48x32" in fails(*start, "--image", photo, "--mask", tmp_path / "small.png")
    assert "image's width is 20" in fails(*start, "--image", tmp_path / "odd.png")
    assert "text.png: not a picture in a known format" in fails(*start, "--image", tmp_path / "text.png")
    assert "the prompt is empty" in fails("image", "  ", "--model", model)
    assert "'\\udce9'" in fails("image", "\udce9", "--model", model)
    assert "required: PROMPT" in fails("image")


def test_unknown_and_damaged_models(fails, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_network(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", no_network)
    assert "cannot load 'dall-e'" in fails("image", "a fox", "--model", "dall-e")
    assert "the hub cannot be reached" in fails("image", "a fox", "--model", "some/model")
    damaged = shutil.copytree(model, tmp_path / "damaged")
    weights = (model / "denoiser.safetensors").read_bytes()
    (damaged / "denoiser.safetensors").write_bytes(weights[:-100])
    assert "denoiser.safetensors is truncated" in fails("image", "a fox", "--model", damaged)
    (damaged / "denoiser.safetensors").write_bytes(b"hello" + weights[5:])
    assert "denoiser.safetensors" in fails("image", "a fox", "--model", damaged)
    (damaged / "denoiser.safetensors").unlink()
    assert "no such file" in fails("image", "a fox", "--model", damaged)


def test_full_disk(fails, model: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    assert fails("image", "a fox", "--model", model, "-o", "fox.png") == "fox.png: No space left on device"


def test_ctrl_c_between_steps(run, model: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    slope = PlateDenoiser.slope

    def interrupt_third(self: PlateDenoiser, *arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return slope(self, *arguments)

    monkeypatch.setattr(PlateDenoiser, "slope", interrupt_third)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start with it ignored
    try:
        code, out, err = run("image", "a fox", "--model", model, "--steps", "8", "-o", "fox.png")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, out, err, len(calls)) == (130, [], ["calotype: interrupted"], 3)
    assert os.listdir() == []


def test_interruption_while_writing(run, model: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    assert run("image", "a fox", "--model", model, "-o", "fox.png") == (130, [], ["calotype: interrupted"])
    assert os.listdir() == []


def test_non_finite_values_are_an_error(fails, model: Path, tmp_path: Path):
    from calotype.pipelines.load import load

    pipe = load(model)
    next(pipe.denoiser.parameters()).fill_(float("nan"))
    pipe.save(tmp_path / "nan")
    assert "non-finite values in denoise, step 0" in fails("image", "a fox", "--model", tmp_path / "nan", "-o", "a.png")
