"""The command line as a whole: help, exit codes, what is imported."""

import os
import subprocess
import sys
from typing import IO

import pytest

from calotype.cli import main


def test_help_and_version_import_nothing_heavy():
    code = """
import sys
from calotype.cli import main
assert main(["--help"]) == 0 and main(["image", "--help"]) == 0 and main(["--version"]) == 0
assert main([]) == 2 and main(["image", "a", "--size", "x"]) == 2
print(sorted({"torch", "numpy", "PIL", "tokenizers", "tqdm", "safetensors"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]" and "calotype 0." in run.stdout
    assert all(line.startswith("calotype: error: ") for line in run.stderr.splitlines())


def test_module_runs():
    run = subprocess.run([sys.executable, "-m", "calotype", "imagine"], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("calotype: error: argument COMMAND: invalid choice: 'imagine'")
    assert run.stderr.count("\n") == 1


def version_into(stdout: int | IO[str]) -> subprocess.CompletedProcess[str]:
    """`calotype --version` with a buffered standard output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "calotype", "--version"]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, env=environment)


def test_full_standard_output():
    with open("/dev/full", "w") as full:
        run = version_into(full)
    assert run.returncode == 2 and run.stderr == "calotype: error: No space left on device\n"


def test_a_closed_pipe_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    run = version_into(writer)
    os.close(writer)
    assert (run.returncode, run.stderr) == (141, "")


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (OSError("odd"), "odd"),
        (PermissionError(13, "Permission denied", "/srv/x"), "/srv/x: Permission denied"),
        (ImportError("No module named 'tqdm'"), "No module named 'tqdm'"),
        (ValueError("two\nlines  here"), "two lines here"),
        (FloatingPointError("not finite"), "not finite"),
    ],
)
def test_errors_become_one_line(monkeypatch, capsys, failure: Exception, message: str):
    def fail(options: object) -> int:
        raise failure

    monkeypatch.setattr("calotype.cli.doctor.run", fail)
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == f"calotype: error: {message}\n"


def test_a_bug_is_not_hidden(monkeypatch):
    def fail(options: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("calotype.cli.doctor.run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["doctor"])
