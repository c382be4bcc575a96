"""`calotype diff PATH`: the same run here and in diffusers, stage by stage."""

import argparse
from pathlib import Path

from .common import Commands, add_threads_option, count, size, use_threads, words

EXAMPLES = """\
examples:
  calotype diff models/FLUX.1-schnell --size 512 --steps 2
  calotype diff models/FLUX.1-dev --prompt "two red boats" --seed 7 --tolerance 1e-5
  calotype diff models/Qwen-Image-Edit-2509 --image cat.png --image hat.png --prompt "the cat wears the hat"
  calotype diff models/LTX-Video --image cat.png --size 704x480 --frames 9 --steps 2
"""
PROMPT = "a photo of a fox on a beach"
DIVERGED = 1


def add_to(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "diff",
        help="compare a checkpoint's run with diffusers'",
        description="Runs a folder in diffusers' layout here and in diffusers, in float32 on the CPU with the same "
        "seed, prints how far each stage is from diffusers' and names the first that is too far. Exit code 1 if there "
        "is one.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a folder in diffusers' layout")
    parser.add_argument("--prompt", nargs="+", default=[PROMPT], metavar="WORDS", help=f"default: {PROMPT}")
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a picture to look at, for models that edit (again for more of them), that a refiner starts from, or that "
        "a clip begins with (again: ends with)",
    )
    parser.add_argument("--size", type=size, metavar="WxH", help="pixels (default: the model's own)")
    parser.add_argument("--steps", type=count, help="denoising steps (default: the model's own)")
    parser.add_argument("--frames", type=count, help="of a clip (default: the model's own)")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="relative difference that a stage may have (default 1e-4)"
    )
    add_threads_option(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints a line per stage, and the verdict."""
    if not options.tolerance >= 0:
        raise ValueError(f"--tolerance is {options.tolerance}; it must be 0 or more")
    from ..pipelines.compare import Run, compare_folder, first_divergence

    use_threads(options.threads)
    width, height = options.size or (None, None)
    asked = Run(
        prompt=words(options.prompt),
        width=width,
        height=height,
        num_inference_steps=options.steps,
        num_frames=options.frames,
        seed=options.seed,
        images=tuple(options.image),
    )
    stages = compare_folder(options.path, asked)
    for stage in stages:
        mark = "  too far" if stage.diverges(options.tolerance) else ""
        print(f"{stage.name:<22} {stage.difference:.1e}{mark}{f'  ({stage.note})' if stage.note else ''}")
    first = first_divergence(stages, options.tolerance)
    if first is None:
        print(f"the same as diffusers within {options.tolerance:g} at every stage")
        return 0
    print(f"first divergence: {first.name}")
    return DIVERGED
