"""Files and folders that appear whole or not at all."""

import os
from pathlib import Path

import pytest

from calotype.core.whole_file import whole_file, whole_folder


@pytest.mark.parametrize("before", [None, b"old"])
def test_the_file_appears_at_the_end(tmp_path: Path, before: bytes | None):
    path = tmp_path / "a.txt"
    if before is not None:
        path.write_bytes(before)
    with whole_file(path) as beside:
        assert beside.parent == tmp_path and beside != path
        beside.write_bytes(b"new")
        assert (path.read_bytes() if path.exists() else None) == before
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_a_failure_in_the_block_leaves_what_was_there(tmp_path: Path, error: type[BaseException]):
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    with pytest.raises(error), whole_file(path) as beside:
        beside.write_bytes(b"half")
        raise error
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_after_the_block_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str):
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"), whole_file(path) as beside:
        beside.write_bytes(b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_nothing_was_written(tmp_path: Path):
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "a.txt"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exists", [False, True])
def test_the_folder_appears_at_the_end(tmp_path: Path, exists: bool):
    path = tmp_path / "above" / "a"
    if exists:
        path.mkdir(parents=True)
    with whole_folder(path) as beside:
        (beside / "inside").write_text("x")
        assert path.exists() == exists and beside.parent == path.parent
    assert [each.name for each in path.iterdir()] == ["inside"] and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_a_failure_leaves_no_folder(tmp_path: Path, error: type[BaseException]):
    with pytest.raises(error), whole_folder(tmp_path / "above" / "a") as beside:
        (beside / "inside").write_text("x")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_filled_meanwhile_is_left_alone(tmp_path: Path):
    path = tmp_path / "a"
    with pytest.raises(OSError), whole_folder(path) as beside:
        (beside / "inside").write_text("x")
        path.mkdir()
        (path / "theirs").write_text("y")
    assert [each.name for each in path.iterdir()] == ["theirs"] and list(tmp_path.iterdir()) == [path]
