"""`calotype inspect PATH`: what a model's files hold, and the memory that it takes."""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from .common import Commands

if TYPE_CHECKING:
    from ..pipelines.inspection import Component, Inspection

REFUSED = 2


def add_to(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "inspect",
        help="what a model's files hold, and the memory it takes",
        description="Says from headers alone what a model is: family, parts, parameters, formats, what is missing and "
        "how it is given, what calotype.load would refuse, and the memory for loading and running it. Nothing is "
        "downloaded. Exit code 2: not a model, or one that calotype.load refuses.",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help="a folder, a .safetensors or .gguf file, or a downloaded hub id")
    parser.add_argument("--variant", help='of the weights where parts come in several, such as "fp16"')
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints what was found."""
    from ..pipelines.inspection import inspect_model

    found = inspect_model(options.path, options.variant)
    if options.json:
        print(json.dumps({**asdict(found), "parameters": found.parameters}, indent=2))
    else:
        for line in _lines(found):
            print(line)
    return 0 if found.refused is None else REFUSED


def _lines(found: "Inspection") -> Iterator[str]:
    yield f"{found.family}: {found.kind}"
    if found.others:
        yield f"or {' or '.join(found.others)}: nothing in it tells; calotype.load(..., family=...) says which it is"
    width = max(len(component.name) for component in found.components)
    for component in found.components:
        yield f"  {component.name:<{width}}  {_text(component)}"
    if len(found.components) > 1:
        size = sum(component.bytes for component in found.components)
        yield f"  {'all':<{width}}  {_sizes(found.parameters, size)}"
    for part in found.missing:
        yield f"missing: {part}"
    if found.advice:
        yield f"to give what is missing: {found.advice}"
    if found.refused is not None:
        yield f"refused: {' '.join(found.refused.split())}"
    yield f"memory to load: {_by_dtype(found.load)} (weights, and the largest tensor on its way)"
    if found.run:
        yield f"memory to run: {_by_dtype(found.run)}, an estimate ({found.estimate})"


def _text(component: "Component") -> str:
    formats = ", ".join(
        name if len(component.formats) == 1 else f"{name} {count / component.parameters:.0%}"
        for name, count in component.formats.items()
    )
    return f"{_sizes(component.parameters, component.bytes)}  {formats}"


def _sizes(parameters: int, size: int) -> str:
    return f"{parameters / 1e6:10.2f} M parameters {size / 1e9:8.3f} GB"


def _by_dtype(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{size / 1e9:.2f} GB in {name}" for name, size in sizes.items())
