"""`calotype replay FILE`: makes a picture again and says whether it is the same."""

import argparse
import sys
import time
from pathlib import Path

from .common import Commands, add_threads_option, use_threads, warn

DIFFERENT = 1


def add_to(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "replay",
        help="make a picture again from its file",
        description="Makes a picture again from the manifest in its file, and says whether it is bit-equal. "
        "Exit code 0: it is; 1: it is not.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a picture that calotype made")
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        metavar="INPUT",
        help="the picture that run started from or looked at, if it did; several: once for each, in their order",
    )
    parser.add_argument("--mask", type=Path, metavar="INPUT", help="the mask of that run, if it had one")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the new picture, manifest included")
    add_threads_option(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Replays, reports, and writes the new picture where asked."""
    started = time.perf_counter()
    from ..pipelines.files import check_target, open_image, read_manifest, save_image

    if options.output is not None:
        check_target(options.output)
    recorded = read_manifest(options.file)
    image = None if options.image is None else [open_image(file) for file in options.image]
    mask = None if options.mask is None else open_image(options.mask)
    from ..pipelines.replay import replay

    use_threads(options.threads or recorded.threads)
    replayed = replay(options.file, image=image, mask_image=mask, progress=sys.stderr.isatty())
    for line in (*replayed.result.warnings, *replayed.remarks):
        warn(line)
    if options.output is not None:
        save_image(replayed.image, options.output, replayed.again)
        print(options.output)
    verdict = "bit-equal" if replayed.bit_equal else f"different, by up to {replayed.largest_difference} of 255"
    print(f"{options.file}: {verdict}  (seed {recorded.seed}, {time.perf_counter() - started:.1f} s)")
    return 0 if replayed.bit_equal else DIFFERENT
