"""`calotype video PROMPT`: a clip of what the words say."""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .common import Commands, count, free_name, warn, words
from .making import add_making_options, add_output_option, asked, check_count, load_model

if TYPE_CHECKING:
    from ..pipelines.conditions import Condition
    from ..pipelines.image import ImagePipeline
    from ..pipelines.result import Result

EXAMPLES = """\
examples:
  calotype video "a cat walks on grass" --model Wan2.1-T2V-1.3B-Diffusers -o cat.mp4
  calotype video "the cat jumps" --model Wan2.1-I2V-14B-480P-Diffusers --image cat.png --frames 33 -o cat.webm
  calotype video "a cat" --model LTX-Video-0.9.5 --condition a.png --condition b.mp4@80:0.8 --frames 121 -o cat.webm
"""
FORMAT = ".mp4"
STILL = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
"""What files of pictures end with; others are clips, of one frame maybe."""


def add_to(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "video",
        help="make clips from words",
        description="Makes a clip of what the words say, with a model that makes clips. With --image it begins with a "
        "picture, with --video it starts from a clip.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_making_options(parser, "clip")
    parser.add_argument("--frames", type=count, help="how many frames (default: the model's own)")
    parser.add_argument("--fps", type=float, help="frames a second (default: those of --video, else the model's own)")
    parser.add_argument("--image", type=Path, metavar="FILE", help="begin with this picture")
    parser.add_argument("--last-image", type=Path, metavar="FILE", help="end with this picture")
    parser.add_argument("--video", type=Path, metavar="FILE", help="start from this clip")
    parser.add_argument("--strength", type=float, help="how far to go from --video: 0 keeps it, 1 forgets it")
    parser.add_argument(
        "--condition",
        action="append",
        default=[],
        metavar="FILE[@FRAME[:STRENGTH]]",
        help="show this picture or clip from that frame on (default 0), with a strength from 0 to 1 (default 1); "
        "several: once for each",
    )
    parser.add_argument("--codec", help="of a .mp4: h264 (default) or vp9")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="write frames on one sheet, a picture, as well")
    add_output_option(
        parser, "a .mp4, .webm, .gif or .webp file, or .png for a file of each frame", "several clips, and frames,"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Checks everything that needs no model, runs, writes the files and prints their names."""
    started = time.perf_counter()
    prompt = words(options.prompt)
    from ..pipelines.clips import check_clip_target
    from ..pipelines.files import check_target
    from ..pipelines.frame_names import numbered

    check_count(options)
    target = _target(options, prompt)
    targets = numbered(target, options.count)
    for each in targets:
        check_clip_target(each, fps=options.fps, codec=options.codec, num_frames=options.frames or 1)
    if options.sheet is not None:
        check_target(options.sheet)
        _check_apart(options.sheet, targets)
    own = _own_arguments(options)
    pipe = _loaded(options)
    if own.get("video") is None and pipe.recipe.num_frames == 1:  # it makes pictures, unless asked otherwise
        own.setdefault("num_frames", pipe.recipe.max_frames)
    for each in targets:
        num_frames = cast(int, own.get("num_frames") or pipe.recipe.num_frames)
        check_clip_target(each, fps=options.fps or pipe.recipe.fps, codec=options.codec, num_frames=num_frames)
    if options.fps is not None and "frame_rate" in pipe.family.arguments:  # the model is told it, too
        own["frame_rate"] = options.fps
    result = pipe(prompt, **cast(Any, asked(options) | own), progress=sys.stderr.isatty())
    for line in result.warnings:
        warn(line)
    _write(result, target, options, started)
    return 0


def _target(options: argparse.Namespace, prompt: str) -> Path:
    """The file to write; several clips are numbered after it."""
    output: Path | None = options.output
    if output is None or output.is_dir():
        return free_name(output or Path(), prompt, options.count, FORMAT)
    return output


def _check_apart(sheet: Path, targets: Sequence[Path]) -> None:
    """The sheet must not take the place of a clip, nor of one of its frames."""
    for target in targets:
        frames = rf"{re.escape(target.stem)}(-\d+)?" if target.suffix.lower() == ".png" else re.escape(target.stem)
        same = sheet.parent.resolve() == target.parent.resolve() and sheet.suffix == target.suffix
        if same and re.fullmatch(frames, sheet.stem):
            raise ValueError(f"--sheet {sheet} would take the place of the clip or of one of its frames: name another")


def _own_arguments(options: argparse.Namespace) -> dict[str, object]:
    """What is given of the arguments that only clips have; files are read."""
    from ..pipelines.clips import read_clip
    from ..pipelines.files import open_image

    files = {"image": options.image, "last_image": options.last_image}
    own: dict[str, object] = {name: open_image(file) for name, file in files.items() if file is not None}
    if options.video is not None:
        clip = read_clip(options.video)
        own["video"] = clip.frames
        options.fps = clip.fps if options.fps is None else options.fps
    if options.condition:
        own["conditions"] = [_condition(given) for given in options.condition]
    numbers = {"num_frames": options.frames, "strength": options.strength}
    return own | {name: number for name, number in numbers.items() if number is not None}


def _condition(given: str) -> "Condition":
    """What `FILE[@FRAME[:STRENGTH]]` says; the file is read."""
    from ..pipelines.conditions import Condition

    told = re.fullmatch(r"(.+?)(?:@(\d+)(?::(\d*\.?\d+))?)?", given)
    file, frame, strength = (given, None, None) if told is None else told.groups()
    if "@" in file and not Path(file).exists():
        raise FileNotFoundError(f"--condition {given}: no such file; what it shows is said as FILE@FRAME:STRENGTH")
    kind = "image" if file.lower().endswith(STILL) else "video"
    where: dict[str, Any] = {kind: file, "frame_index": int(frame or 0), "strength": float(strength or 1)}
    return Condition(**where).opened()


def _loaded(options: argparse.Namespace) -> "ImagePipeline":
    from ..pipelines.frames import makes_clips

    pipe = load_model(options)
    if not makes_clips(pipe.family):
        raise ValueError(f"{pipe.source.name} makes pictures, not clips: give --model one that does, such as Wan 2.1")
    return pipe


def _write(result: "Result", target: Path, options: argparse.Namespace, started: float) -> None:
    files = result.save(target, fps=options.fps, codec=options.codec)
    if options.sheet is not None:
        result.save_grid(options.sheet)
    seconds = time.perf_counter() - started
    each = len(files) // len(result.seeds)
    for row, seed in enumerate(result.seeds):
        first, last = files[row * each], files[(row + 1) * each - 1]
        name = str(first) if first == last else f"{first} to {last}"
        print(f"{name}  (seed {seed}, {seconds:.1f} s)")
    if options.sheet is not None:
        print(options.sheet)
