"""`calotype models`: what can be loaded, and the figures of the bundled model."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .common import Commands

LOADABLE = """\
What --model takes:
  plate         the bundled model above (the default)
  a folder      in diffusers' layout, or one with the files above, such as pipe.save(folder) writes
  a hub id      owner/name; downloaded once, after its size was told
Families: {families}.
A file that holds a denoiser alone loads in Python, where the other parts are given:
calotype.load(file, encoders=..., vae=...). What a file or folder is: calotype inspect PATH."""


def add_to(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "models", help="what can be loaded", description="What can be loaded.", allow_abbrev=False
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the table."""
    from ..pipelines.families import titles
    from ..pipelines.load import bundled_folder
    from ..pipelines.plate import WEIGHTS, read_config

    folder = bundled_folder()
    config = read_config(folder / "config.json")
    rows = [_row(folder / name) for name in WEIGHTS]
    for line in ("plate (bundled): words to pictures and clips, and prompts to longer prompts", *rows):
        print(line)
    for line in (*_recipe(config.get("recipe", {})), *_figures(folder.parent), "", LOADABLE.format(families=titles())):
        print(line)
    return 0


def _row(file: Path) -> str:
    from ..core.checkpoint import read_header

    tensors = read_header(file).tensors.values()
    millions = sum(math.prod(tensor.shape) for tensor in tensors) / 1e6
    dtypes = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))
    return f"  {file.stem:<13} {millions:6.2f} M parameters  {file.stat().st_size / 1e6:6.2f} MB  {dtypes}"


def _recipe(recipe: Mapping[str, Any]) -> list[str]:
    return [f"  {name.replace('_', ' '):<22} {value}" for name, value in recipe.items() if value is not None]


def _figures(folder: Path) -> list[str]:
    """The tables of the model card."""
    lines: list[str] = []
    for card in sorted(folder.glob("*.md")):
        rows = [line.strip() for line in card.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        lines += ["", f"From its card ({card}):", *(f"  {row}" for row in rows)]
    return lines
