"""`calotype replay`."""

import json
from pathlib import Path

import numpy
import pytest
from PIL import Image

from calotype.pipelines.files import open_image, read_manifest, save_image


@pytest.fixture
def fox(run, model: Path) -> Path:
    """The second picture of a batch of three."""
    assert run("image", "a fox", "--model", model, "--seed", "7", "--count", "3", "-o", "fox.png")[0] == 0
    return Path("fox-2.png")


def test_bit_equal(run, fox: Path):
    code, out, err = run("replay", fox)
    assert (code, err) == (0, [])
    assert out[0].startswith("fox-2.png: bit-equal  (seed 8, ")


def test_the_new_picture_can_be_written(run, fox: Path):
    code, out, _ = run("replay", fox, "-o", "again.png")
    assert (code, out[0]) == (0, "again.png")
    assert open_image("again.png").tobytes() == open_image(fox).tobytes()
    assert read_manifest("again.png") == read_manifest(fox)


def test_a_changed_picture_is_reported(run, fox: Path):
    pixels = numpy.asarray(open_image(fox)).copy()
    pixels[3, 4, 1] ^= 128
    manifest = read_manifest(fox)
    older = type(manifest).from_json(json.dumps(json.loads(manifest.to_json()) | {"torch": "1.0"}))
    save_image(Image.fromarray(pixels), "changed.png", older)
    code, out, err = run("replay", "changed.png")
    assert code == 1 and out[0].startswith("changed.png: different, by up to 128 of 255  (seed 8, ")
    assert len(err) == 1 and err[0].startswith("calotype: warning: torch was 1.0, is now ")


def test_a_jpeg_is_told_to_be_lossy(run, model: Path):
    assert run("image", "a fox", "--model", model, "--seed", "7", "-o", "fox.jpg")[0] == 0
    code, out, err = run("replay", "fox.jpg")
    assert code == 0 and err == [
        "calotype: warning: JPEG is lossy: pixels in the file differ from those that were made"
    ]
    assert out[0].startswith("fox.jpg: a JPEG of the new picture is bit-equal to this one, which differs from what ")
    assert run("image", "a fox", "--model", model, "--seed", "7", "-o", "fox.webp")[0] == 0
    image = open_image("fox.webp")
    image.save("fox.webp", quality=50, exif=image.getexif())
    code, out, err = run("replay", "fox.webp")
    assert code == 1 and out[0].startswith("fox.webp: different, by up to ")
    assert err[0].startswith("calotype: warning: this WebP, which another program has saved again, is lossy: pixels")


def test_inputs_are_asked_for(run, fails, model: Path, fox: Path):
    common = ("--image", fox, "--mask", "mask.png", "--seed", "3")
    Image.new("L", (32, 32), 255).save("mask.png")
    assert run("image", "a cat", "--model", model, *common, "-o", "cat.png")[0] == 0
    assert "this inpaint run needs its image" in fails("replay", "cat.png")
    assert "this inpaint run needs its mask_image" in fails("replay", "cat.png", "--image", fox)
    assert "not the image of that run" in fails("replay", "cat.png", "--image", "fox-1.png", "--mask", "mask.png")
    code, out, _ = run("replay", "cat.png", "--image", fox, "--mask", "mask.png")
    assert code == 0 and out[0].startswith("cat.png: bit-equal")


def test_mistakes(fails, fox: Path):
    Image.new("RGB", (8, 8)).save("plain.png")
    assert "plain.png: holds no calotype manifest" in fails("replay", "plain.png")
    assert "none.png: no such file" in fails("replay", "none.png")
    assert "extension '.gif' is unknown" in fails("replay", fox, "-o", "a.gif")
