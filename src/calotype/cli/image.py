"""`calotype image PROMPT`: a picture of what the words say."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .common import Commands, free_names, warn, words
from .making import add_making_options, add_output_option, asked, check_count, load_model

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..pipelines.arguments import ImageArguments
    from ..pipelines.result import Result

EXAMPLES = """\
examples:
  calotype image a red car in the snow
  calotype image "a fox on a beach" --negative "two foxes" --seed 7 --count 4 --grid -o foxes.png
  calotype image "a cat" --image dog.png --strength 0.6
"""
IMAGE_HELP = "start from this picture; models that edit look at it, and at several if it is given several times"


def add_to(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "image",
        help="make pictures from words",
        description="Makes a picture of what the words say. With --image it starts from a picture, with --mask it "
        "changes a part of it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_making_options(parser, "picture")
    parser.add_argument("--grid", action="store_true", help="all pictures on one sheet, in one file")
    parser.add_argument("--image", type=Path, action="append", metavar="FILE", help=IMAGE_HELP)
    parser.add_argument(
        "--mask", type=Path, metavar="FILE", help="white where --image may change, black where it stays"
    )
    parser.add_argument("--strength", type=float, help="how far to go from --image: 0 keeps it, 1 forgets it")
    add_output_option(parser, "a .png, .jpg or .webp file", "several pictures")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Checks everything that needs no model, runs, writes the files and prints their names."""
    started = time.perf_counter()
    prompt = words(options.prompt)
    from ..pipelines.files import check_target, open_image

    check_count(options)
    targets = _targets(options, prompt)
    for target in targets:
        check_target(target)
    if options.mask is not None and options.image is None:
        raise ValueError("--mask says where --image may change: give --image too")
    image = None if options.image is None else [open_image(file) for file in options.image]
    mask = None if options.mask is None else open_image(options.mask)
    result = _compute(options, prompt, image, mask)
    for line in result.warnings:
        warn(line)
    _save(result, targets, sheet=options.grid)
    seconds = time.perf_counter() - started
    seeds = [", ".join(map(str, result.seeds))] if options.grid else [str(seed) for seed in result.seeds]
    for target, seed in zip(targets, seeds, strict=True):
        print(f"{target}  (seed {seed}, {seconds:.1f} s)")
    return 0


def _compute(options: argparse.Namespace, prompt: str, image: "list[Image] | None", mask: "Image | None") -> "Result":
    pipe = load_model(options)
    if pipe.recipe.num_frames > 1:
        raise ValueError(f"{pipe.source.name} makes clips, not pictures: use calotype video")
    pictures: ImageArguments = {"image": image, "mask_image": mask, "strength": options.strength}
    return pipe(prompt, **(asked(options) | pictures), progress=sys.stderr.isatty())


def _targets(options: argparse.Namespace, prompt: str) -> tuple[Path, ...]:
    """The files to write."""
    from ..pipelines.frame_names import numbered

    files = 1 if options.grid else options.count
    output: Path | None = options.output
    if output is None or output.is_dir():
        return free_names(output or Path(), prompt, files)
    return numbered(output, files)


def _save(result: "Result", targets: Sequence[Path], *, sheet: bool) -> None:
    from ..pipelines.files import save_image

    if sheet:
        result.save_grid(targets[0])
        return
    for row, (image, target) in enumerate(zip(result.pil(), targets, strict=True)):
        save_image(image, target, None if result.manifest is None else result.manifest.for_row(row))
