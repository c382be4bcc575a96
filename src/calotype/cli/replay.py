"""`calotype replay FILE`: makes a picture or a clip again and says whether it is the same."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .common import Commands, add_threads_option, use_threads, warn

if TYPE_CHECKING:
    from ..pipelines.replay import Replay

DIFFERENT = 1


def add_to(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "replay",
        help="make a picture or a clip again from its file",
        description="Makes a picture or a clip again from the manifest in its file, and says whether it is bit-equal: "
        "to the file or, where that is lossy (.jpg, .mp4, .webm, .gif), to what was made. Exit code 0: it is; 1: it is "
        "not.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a picture or a clip that calotype made")
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        metavar="INPUT",
        help="the picture that run started from or looked at, if it did; several: once for each, in their order",
    )
    parser.add_argument("--mask", type=Path, metavar="INPUT", help="the mask of that run, if it had one")
    parser.add_argument("--last-image", type=Path, metavar="INPUT", help="the picture that the clip ended with")
    parser.add_argument("--video", type=Path, metavar="INPUT", help="the clip that run started from, if it did")
    parser.add_argument(
        "--condition",
        type=Path,
        action="append",
        metavar="INPUT",
        help="a picture or a clip that the clip showed; several: once for each, in their order",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write what was made, manifest included")
    add_threads_option(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Replays, reports, and writes the new picture where asked."""
    started = time.perf_counter()
    from ..pipelines.clips import check_clip_target, read_clip
    from ..pipelines.files import check_target, open_image, read_manifest

    recorded = read_manifest(options.file)
    if options.output is not None:
        if recorded.frames is None:
            check_target(options.output)
        else:
            clip = read_clip(options.file)
            check_clip_target(options.output, fps=clip.fps, num_frames=len(clip.frames))
    image = None if options.image is None else [open_image(file) for file in options.image]
    mask, last = (None if file is None else open_image(file) for file in (options.mask, options.last_image))
    from ..pipelines.replay import replay

    use_threads(options.threads or recorded.threads)
    replayed = replay(
        options.file,
        image=image,
        mask_image=mask,
        last_image=last,
        video=options.video,
        conditions=options.condition,
        progress=sys.stderr.isatty(),
    )
    for line in (*replayed.result.warnings, *replayed.remarks):
        warn(line)
    if options.output is not None:
        for file in replayed.save(options.output):
            print(file)
    print(f"{options.file}: {_verdict(replayed)}  (seed {recorded.seed}, {time.perf_counter() - started:.1f} s)")
    return 0 if replayed.bit_equal else DIFFERENT


def _verdict(replayed: "Replay") -> str:
    difference = f"by up to {replayed.largest_difference} of 255"
    if not replayed.bit_equal:
        return f"different, {difference}"
    if replayed.largest_difference == 0:
        return "bit-equal"
    if replayed.clip is None:
        return f"a JPEG of the new picture is bit-equal to this one, which differs from what was made {difference}"
    return f"the frames are bit-equal to those that were made; those in this lossy file differ from them {difference}"
