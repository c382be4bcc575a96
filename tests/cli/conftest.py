"""The command line run in this process."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from calotype.cli import main

Run = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture(scope="session")
def model(plate_folder: Path) -> Path:
    """The folder of a tiny plate model."""
    return plate_folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line in an empty folder: exit code, lines on stdout, lines on stderr."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def call(*arguments: object) -> tuple[int, list[str], list[str]]:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return call


@pytest.fixture
def fails(run: Run) -> Callable[..., str]:
    """Runs a command line that must fail as a user's mistake, and leave no file; returns what the line says."""

    def call(*arguments: object) -> str:
        before = sorted(os.listdir())
        code, out, err = run(*arguments)
        assert (code, out, len(err)) == (2, [], 1), err
        assert sorted(os.listdir()) == before
        assert err[0].startswith("calotype: error: ")
        return err[0].removeprefix("calotype: error: ")

    return call
