from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from fakes import fake_pipeline
from PIL import Image

from calotype.pipelines.pictures import (
    centre_crop,
    read_lists,
    read_masks,
    read_pictures,
    resized,
    size_text,
    spread,
)

PIXELS = numpy.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=numpy.uint8)
EXPECTED = torch.from_numpy(PIXELS).permute(2, 0, 1)[None, :, None].float() / 255 * 2 - 1
UNIT = torch.from_numpy(PIXELS).permute(2, 0, 1).float() / 255


def test_every_form_of_a_picture(tmp_path: Path):
    path = tmp_path / "a.png"
    Image.fromarray(PIXELS).save(path)
    forms: list[Any] = [
        Image.fromarray(PIXELS),
        path,
        str(path),
        PIXELS,
        PIXELS[None],
        numpy.asarray(Image.fromarray(PIXELS)),  # read-only
        PIXELS.astype(numpy.float32) / 255,
        (PIXELS / 255).astype(">f8"),
        (PIXELS / 255).astype(numpy.longdouble),
        UNIT,
        UNIT[None],
        [UNIT],
        torch.from_numpy(PIXELS).permute(2, 0, 1),
    ]
    for form in forms:
        torch.testing.assert_close(read_pictures(form), EXPECTED)


def test_grey_and_transparent_pictures():
    grey = read_pictures(Image.new("L", (6, 4), 255))
    assert grey.shape == (1, 3, 1, 4, 6) and bool((grey == 1).all())
    assert bool((read_pictures(Image.new("RGBA", (6, 4), (0, 0, 0, 0))) == 1).all())


def test_a_photo_taken_sideways_is_turned(tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(PIXELS).save(tmp_path / "a.png", exif=exif)
    assert read_pictures(tmp_path / "a.png").shape[-2:] == (6, 4)


MASK = numpy.array([[0, 255, 127], [128, 0, 255]], dtype=numpy.uint8)


@pytest.mark.parametrize(
    "form",
    [
        Image.fromarray(MASK),
        Image.fromarray(MASK).convert("RGB"),
        MASK,
        MASK[..., None],
        MASK > 127,
        torch.from_numpy(MASK),
        torch.from_numpy(MASK)[None],
        torch.from_numpy(MASK > 127)[None, None],
        MASK.astype(numpy.float64) / 255,
    ],
)
def test_every_form_of_a_mask(form: Any):
    assert torch.equal(read_masks(form), torch.from_numpy(MASK > 127)[None, None, None])


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ([], "an empty list of pictures"),
        (numpy.zeros((4, 6)), r"image has shape \(1, 4, 6\); it must be \[H, W, 3\]"),
        (torch.zeros(4, 5, 6), r"image has shape \(4, 5, 6\); it must be \[3, H, W\]"),
        (torch.full((3, 4, 4), -1.0), "image has values from -1 to -1; floats must be from 0 to 1"),
        (torch.full((3, 4, 4), torch.nan), "image has values from nan to nan"),
        (numpy.full((4, 4, 3), 255.0), "image has values from 255 to 255"),
        ({"a": 1}, "image is of type dict"),
        (torch.zeros(0, 3, 4, 6), r"image has shape \(0, 3, 4, 6\), which holds no picture"),
        (torch.zeros(3, 4, 6).to_sparse(), "torch.sparse_coo; it must be a dense one"),
        (Image.fromarray(numpy.full((4, 6), 300, numpy.uint16)), "image has more than 8 bits a channel .mode I;16"),
        (Image.new("F", (6, 4)), "image has more than 8 bits a channel .mode F"),
    ],
)
def test_what_is_no_picture(form: Any, message: str):
    with pytest.raises(ValueError, match=message):
        read_pictures(form)


def test_unreadable_files(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(b"nothing like a picture")
    with pytest.raises(ValueError, match="not a picture in a known format"):
        read_pictures(tmp_path / "a.png")
    with pytest.raises(FileNotFoundError, match=r"b\.png"):
        read_pictures(tmp_path / "b.png")


def test_spread():
    assert spread(torch.zeros(3, 1), "image", 3, 2) == (0, 0, 1, 1, 2, 2)
    with pytest.raises(ValueError, match="mask_image holds 2 pictures for 3 prompts"):
        spread(torch.zeros(2, 1), "mask_image", 3, 2)


def test_lists_of_pictures(tmp_path: Path):
    """One list, or several; every form of a picture, in its own size."""
    small, wide = Image.new("L", (3, 2), 51), numpy.full((2, 5, 3), 255, numpy.uint8)
    small.save(tmp_path / "small.png")
    assert [len(each) for each in read_lists(small)] == [1]
    ((first, second, third),) = read_lists([tmp_path / "small.png", wide, small])
    assert (first.shape, second.shape) == ((3, 2, 3), (3, 2, 5))
    assert torch.equal(first, third) and torch.equal(first, torch.full((3, 2, 3), 0.2))
    assert [[size_text(picture) for picture in each] for each in read_lists([[small], [wide, small]])] == [
        ["3x2"],
        ["5x2", "3x2"],
    ]
    with pytest.raises(ValueError, match="it takes either, not both"):
        read_lists([small, [wide]])
    with pytest.raises(ValueError, match="an empty list"):
        read_lists([[small], []])
    with pytest.raises(ValueError, match="image is of type int"):
        read_lists([small, 3])


def test_another_size_is_that_of_pillow():
    pixels = torch.randint(0, 256, (7, 9, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8).numpy()
    picture = torch.from_numpy(pixels).permute(2, 0, 1) / 255
    expected = numpy.asarray(Image.fromarray(pixels).resize((5, 12), Image.Resampling.LANCZOS))
    assert torch.equal(resized(picture, 5, 12), torch.from_numpy(expected.copy()).permute(2, 0, 1) / 255)


def test_the_middle():
    picture = torch.arange(12.0).reshape(1, 3, 4)
    assert centre_crop(picture, 2, 2).tolist() == [[[1, 2], [5, 6]]]
    assert torch.equal(centre_crop(picture, 4, 3), picture)


def test_files_are_opened_once_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """For their pixels and their digests; as if the pictures had been given."""
    picture, mask = Image.new("RGB", (32, 32), (9, 80, 200)), Image.new("L", (32, 32), 255)
    files = {"image": tmp_path / "a.png", "mask_image": tmp_path / "m.png"}
    picture.save(files["image"])
    mask.save(files["mask_image"])
    opened, open_file = list[str](), Image.open
    monkeypatch.setattr(Image, "open", lambda path: [opened.append(Path(path).name), open_file(path)][1])
    pipe = fake_pipeline()
    made = pipe("a", image=[str(files["image"])], mask_image=files["mask_image"], strength=0.5, seed=1)
    assert sorted(opened) == ["a.png", "m.png"]
    given = pipe("a", image=picture, mask_image=mask, strength=0.5, seed=1)
    assert torch.equal(made.latents, given.latents)
    assert made.manifest == given.manifest
