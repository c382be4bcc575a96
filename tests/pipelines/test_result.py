"""Results: kinds of output, saving, contact sheets."""

from pathlib import Path

import numpy
import pytest
import torch
from fakes import text_to_image_manifest
from PIL import Image

from calotype.pipelines.files import open_image, read_manifest
from calotype.pipelines.result import OUTPUT_TYPES, Result, grid, numbered, to_images


def make(count: int, output_type: str = "pil", width: int = 32) -> Result:
    seeds = tuple(range(7, 7 + count))
    manifest = text_to_image_manifest(["a fox"] * count, seeds, width)
    images = to_images(pixels(count, width), output_type)
    latents = torch.zeros(count, 8, 1, 2, 4)
    return Result(images=images, latents=latents, seeds=seeds, timings={}, warnings=(), manifest=manifest)


def pixels(count: int, width: int = 32) -> torch.Tensor:
    return torch.rand((count, 3, 1, 16, width), generator=torch.Generator().manual_seed(0)) * 2.4 - 1.2


def test_output_types_agree():
    kinds = {kind: to_images(pixels(2), kind) for kind in OUTPUT_TYPES}
    assert kinds["latent"] is None
    assert kinds["pt"].shape == (2, 3, 16, 32) and kinds["np"].shape == (2, 16, 32, 3)
    assert kinds["np"].dtype == numpy.float32 and kinds["np"].min() >= 0 and kinds["np"].max() <= 1
    assert numpy.array_equal(kinds["pt"].permute(0, 2, 3, 1).numpy(), kinds["np"])
    assert kinds["pil"][1].size == (32, 16)
    for kind in ("pil", "np", "pt"):
        assert make(2, kind).pil()[1].tobytes() == kinds["pil"][1].tobytes()
    with pytest.raises(ValueError, match="output_type 'jpg': allowed are pil, np, pt, latent"):
        to_images(pixels(1), "jpg")


def test_levels_are_rounded_and_clamped():
    values = torch.tensor([-2.0, -1.0, 0.0, 1.0, 5.0]).reshape(1, 1, 1, 1, 5).expand(1, 3, 1, 1, 5)
    assert numpy.asarray(to_images(values, "pil")[0])[0, :, 0].tolist() == [0, 0, 128, 255, 255]


def test_nothing_decoded_cannot_be_saved(tmp_path: Path):
    with pytest.raises(ValueError, match="output_type='latent' decodes no pictures"):
        make(1, "latent").save(tmp_path / "a.png")


def test_saving_numbers_several(tmp_path: Path):
    assert make(1).save(tmp_path / "fox.png") == (tmp_path / "fox.png",)
    paths = make(12, "pt").save(str(tmp_path / "fox.png"))
    assert [path.name for path in paths[:2]] == ["fox-01.png", "fox-02.png"] and paths[-1].name == "fox-12.png"
    assert [read_manifest(path).seed for path in paths] == list(range(7, 19))
    assert open_image(paths[3]).tobytes() == make(12).images[3].tobytes()


@pytest.mark.parametrize("path", [3, None, b"fox.png"])
def test_what_is_no_name_of_a_file(path: object):
    with pytest.raises(ValueError, match=r"^path is .*; it must be the name of a file, such as 'fox\.png'$"):
        make(1).save(path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^path is .*; it must be the name of a file"):
        make(1).save_grid(path)  # type: ignore[arg-type]


def test_every_target_is_checked_before_the_first_is_written(tmp_path: Path):
    (tmp_path / "fox-2.png").mkdir()
    with pytest.raises(ValueError, match=r"fox-2.png: exists and is not a file"):
        make(2).save(tmp_path / "fox.png")
    assert not (tmp_path / "fox-1.png").exists()


def test_numbered():
    assert numbered(Path("d/a.b.png"), 1) == (Path("d/a.b.png"),)
    assert numbered(Path("d/a.b.png"), 2) == (Path("d/a.b-1.png"), Path("d/a.b-2.png"))


def test_grid_places_pictures(tmp_path: Path):
    result = make(3)
    sheet = result.grid()
    assert sheet.size == (2 * 32 + 4, 2 * 16 + 4)
    assert sheet.crop((36, 0, 68, 16)).tobytes() == result.images[1].tobytes()
    assert sheet.crop((0, 20, 32, 36)).tobytes() == result.images[2].tobytes()
    assert sheet.getpixel((33, 3)) == sheet.getpixel((50, 30)) == (255, 255, 255)
    assert result.grid(columns=9).size == (3 * 32 + 8, 16)
    path = result.save_grid(tmp_path / "sheet.png", columns=3)
    assert read_manifest(path) == result.manifest and open_image(path).size == (3 * 32 + 8, 16)


def test_grid_refuses():
    image = Image.new("RGB", (4, 4))
    with pytest.raises(ValueError, match="got none"):
        grid([])
    with pytest.raises(ValueError, match=r"one size, got \[\(4, 4\), \(5, 4\)\]"):
        grid([image, Image.new("RGB", (5, 4))])
    with pytest.raises(ValueError, match="columns 0"):
        grid([image], columns=0)


def test_latents_alone_leave_no_manifest(tmp_path: Path):
    images = to_images(pixels(1), "pil")
    result = Result(images=images, latents=torch.zeros(1), seeds=(), timings={}, warnings=())
    assert result.manifest is None
    (path,) = result.save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="holds no calotype manifest"):
        read_manifest(path)
