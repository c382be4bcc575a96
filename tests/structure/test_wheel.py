"""The wheel holds the package, all of it, and nothing else."""

import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from repository import ROOT, in_package, installed_name, tracked


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the tracked files, built offline with what is installed."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_its_files_are_those_of_the_tree(wheel: Path) -> None:
    """And what a compiler made of the kernels."""
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    built = {name for name in files if name.startswith("calotype/core/ops/_native.") and not name.endswith(".pyi")}
    assert files - built == {installed_name(name) for name in tracked() if in_package(name)}
    assert len(built) == (shutil.which("gcc") is not None and platform.machine() == "x86_64")


def test_nothing_generic_is_importable(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"calotype"}


def test_the_bundled_model_is_small(wheel: Path) -> None:
    held = [file for file in zipfile.ZipFile(wheel).infolist() if file.filename.startswith("calotype/plate/assets/")]
    assert len(held) == 5 and sum(file.file_size for file in held) <= 30e6


def test_its_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    inside = {name.split(".dist-info/")[1]: archive.read(name) for name in archive.namelist() if ".dist-info/" in name}
    assert b"calotype = calotype.__main__:main" in inside["entry_points.txt"]
    assert b"Requires-Dist: torch" in inside["METADATA"]
    licences = {name.rsplit("/", 1)[-1] for name in inside if "LICENSE" in name or "NOTICE" in name}
    assert licences == {"LICENSE", "NOTICE"}
