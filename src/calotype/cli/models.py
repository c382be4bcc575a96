"""`calotype models`: what can be loaded, and the figures of the bundled model."""

import argparse
from pathlib import Path
from typing import Any

from .bundled import WEIGHTS, WeightFile, assets, inspect, read_config
from .common import Commands

LOADABLE = """\
What --model takes:
  plate         the bundled model above (the default)
  a folder      one with the files above, such as pipe.save(folder) writes
Other families (FLUX, Qwen-Image, Wan, ...) do not load yet; what was seen is named when one is tried."""


def add_to(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "models", help="what can be loaded", description="What can be loaded.", allow_abbrev=False
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the table."""
    folder = assets()
    config = read_config(folder)
    files = [inspect(folder / name) for name in WEIGHTS]
    for line in ("plate (bundled): words to pictures, and prompts to longer prompts", *map(_row, files)):
        print(line)
    for line in (*_recipe(config.get("recipe", {})), *_figures(folder.parent), "", LOADABLE):
        print(line)
    return 0


def _row(file: WeightFile) -> str:
    megabytes, millions = file.num_bytes / 1e6, file.num_parameters / 1e6
    return f"  {file.path.stem:<13} {millions:6.2f} M parameters  {megabytes:6.2f} MB  {', '.join(file.dtypes)}"


def _recipe(recipe: dict[str, Any]) -> list[str]:
    return [f"  {name.replace('_', ' '):<22} {value}" for name, value in recipe.items()]


def _figures(folder: Path) -> list[str]:
    """The tables of the model card."""
    lines: list[str] = []
    for card in sorted(folder.glob("*.md")):
        rows = [line.strip() for line in card.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        lines += ["", f"From its card ({card}):", *(f"  {row}" for row in rows)]
    return lines
