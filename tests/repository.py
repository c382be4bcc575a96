"""The tracked files of the repository, for the tests of its structure."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "core",
    "denoisers",
    "encoders",
    "language",
    "vae",
    "schedulers",
    "lora",
    "controlnet",
    "pipelines",
    "plate",
)


@cache
def tracked() -> tuple[str, ...]:
    """Every tracked file that is there, with / between folders."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return tuple(sorted(name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()))


def in_package(name: str) -> bool:
    """Whether a file belongs to the package."""
    return name.startswith("src/calotype/") or name.split("/")[0] in FOLDERS


def installed_name(name: str) -> str:
    """Where a file of the package lies in the wheel."""
    return name.removeprefix("src/") if name.startswith("src/") else f"calotype/{name}"


def python_files() -> tuple[str, ...]:
    """Every tracked Python file."""
    return tuple(name for name in tracked() if name.endswith(".py"))


def package_files() -> tuple[str, ...]:
    """Every Python file of the package."""
    return tuple(name for name in python_files() if in_package(name))


@cache
def parsed(name: str) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse((ROOT / name).read_text(encoding="utf-8"), name)
