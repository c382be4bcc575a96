"""Pictures in files: complete or absent, with the manifest inside."""

import errno
import os
import resource
from pathlib import Path

import numpy
import pytest
from fakes import text_to_image_manifest
from PIL import Image

from calotype.pipelines.files import check_folder, check_target, open_image, read_manifest, save_image
from calotype.pipelines.manifest import Manifest


def picture(side: int = 16) -> Image.Image:
    values = numpy.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=numpy.uint8)
    return Image.fromarray(values)


@pytest.fixture
def manifest() -> Manifest:
    return text_to_image_manifest(["ein Käfer"], [7])


@pytest.mark.parametrize("name", ["a.png", "a.PNG", "a.webp", "a.jpg", "a.jpeg"])
def test_manifest_and_pixels_come_back(tmp_path: Path, manifest: Manifest, name: str):
    path = save_image(picture(), str(tmp_path / name), manifest)
    assert path == tmp_path / name and os.listdir(tmp_path) == [name]
    assert read_manifest(path) == manifest
    difference = numpy.abs(numpy.asarray(open_image(path), int) - numpy.asarray(picture(), int)).max()
    assert difference == 0 or name.endswith(("jpg", "jpeg"))


def test_png_text_is_under_its_key(tmp_path: Path, manifest: Manifest):
    with Image.open(save_image(picture(), tmp_path / "a.png", manifest)) as image:
        assert image.info["calotype"] == manifest.to_json()


def test_file_mode_follows_the_umask(tmp_path: Path):
    before = os.umask(0o027)
    try:
        path = save_image(picture(), tmp_path / "a.png")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_link_is_written_through(tmp_path: Path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.png"
    link.symlink_to(tmp_path / "there" / "a.png")
    save_image(picture(), link)
    assert link.is_symlink() and open_image(tmp_path / "there" / "a.png").size == (16, 16)


def test_full_disk_leaves_what_was_there(tmp_path: Path, manifest: Manifest):
    path = save_image(picture(), tmp_path / "a.png", manifest)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError) as caught:
            save_image(picture(64), path, manifest)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.png"]


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_failure_at_the_last_moment_leaves_nothing(tmp_path: Path, monkeypatch, failure: BaseException):
    def fail(descriptor: int) -> None:
        raise failure

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(failure)):
        save_image(picture(), tmp_path / "a.png")
    assert os.listdir(tmp_path) == []


def test_targets_are_checked(tmp_path: Path):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "full.png").symlink_to("/dev/full")
    for name, error, message in [
        ("a.gif", ValueError, r"extension '.gif' is unknown; allowed are .png, .jpg, .jpeg, .webp"),
        ("a", ValueError, "extension '' is unknown"),
        (f"{'x' * 300}.png", ValueError, "longer than 255 bytes"),
        ("none/a.png", FileNotFoundError, "none: no such folder"),
        ("folder.png", ValueError, "exists and is not a file"),
        ("full.png", ValueError, "exists and is not a file"),
    ]:
        with pytest.raises(error, match=message):
            check_target(tmp_path / name)
    assert check_target(tmp_path / "a.png") == tmp_path / "a.png"
    assert sorted(os.listdir(tmp_path)) == ["folder.png", "full.png"]


def test_unwritable_folder_names_it():
    with pytest.raises(OSError, match="cannot write to this folder") as caught:
        check_folder(Path("/proc"))
    assert caught.value.filename == "/proc"


def test_bad_pictures(tmp_path: Path):
    (tmp_path / "text.png").write_text("hello")
    whole = save_image(picture(64), tmp_path / "whole.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileNotFoundError, match="no such file"):
        open_image(tmp_path / "none.png")
    with pytest.raises(FileNotFoundError, match=r"addresses on the web are not read$"):
        open_image("https://there/a.png")
    with pytest.raises(ValueError, match=f"^{tmp_path}: a folder; a picture is given as a file$"):
        open_image(tmp_path)
    with pytest.raises(ValueError, match=r"text.png: not a picture in a known format"):
        open_image(tmp_path / "text.png")
    with pytest.raises(ValueError, match=r"cut.png: cannot be read as a picture"):
        open_image(tmp_path / "cut.png")
    with pytest.raises(ValueError, match="holds no calotype manifest"):
        read_manifest(tmp_path / "whole.png")


def test_damaged_manifest_names_the_file(tmp_path: Path, manifest: Manifest):
    exif = Image.Exif()
    exif[0x010E] = manifest.to_json()[:-20]
    picture().save(tmp_path / "a.jpg", exif=exif)
    with pytest.raises(ValueError, match=r"a.jpg: not a manifest"):
        read_manifest(tmp_path / "a.jpg")
