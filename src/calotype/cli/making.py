"""What the commands that make pictures and clips share: what is asked of the model."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .common import add_model_options, count, size, use_threads

if TYPE_CHECKING:
    from ..pipelines.arguments import ImageArguments
    from ..pipelines.image import ImagePipeline

SAMPLER_HELP = "euler, heun, dpmpp_2m, unipc, euler_ancestral, ddim, pndm or lcm (default: the model's own)"


def add_making_options(parser: argparse.ArgumentParser, made: str) -> None:
    """The prompt, and options for what it becomes; `made` is what that is called."""
    parser.add_argument("prompt", nargs="+", metavar="PROMPT", help="what to show; words need no quotes")
    parser.add_argument("-n", "--negative", metavar="WORDS", help="what to stay away from")
    parser.add_argument("--size", type=size, metavar="WxH", help="pixels: 128 for a square, or WIDTHxHEIGHT as 128x160")
    parser.add_argument("--steps", type=int, help="denoising steps; more is slower and finer")
    parser.add_argument(
        "--guidance", type=float, help="how strictly to follow the words (1: as trained, without extra push)"
    )
    parser.add_argument(
        "--true-cfg", type=float, metavar="SCALE", help="classifier-free guidance of FLUX.1 and Qwen-Image, over 1"
    )
    parser.add_argument("--seed", type=int, help=f"same seed, same {made}; {made} k of --count gets seed + k - 1")
    parser.add_argument("--count", type=count, default=1, help=f"how many {made}s (default 1)")
    parser.add_argument("--sampler", help=SAMPLER_HELP)
    add_model_options(parser)
    _add_part_options(parser)


def add_output_option(parser: argparse.ArgumentParser, files: str, several: str) -> None:
    """-o: `files` are what can be written."""
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"{files}, replaced if it exists ({several} are numbered), or a folder; "
        "default: a new name made of the prompt",
    )


def check_count(options: argparse.Namespace) -> None:
    """Not more at once than a pipeline makes."""
    from ..pipelines.request_checks import MAX_COUNT

    if options.count > MAX_COUNT:
        raise ValueError(f"--count is {options.count}; it must be from 1 to {MAX_COUNT}")


def load_model(options: argparse.Namespace) -> "ImagePipeline":
    """What --model says, on its device; --sampler and --threads are checked first."""
    from ..schedulers import sampler_by_name

    if options.sampler is not None:
        sampler_by_name(options.sampler)
    use_threads(options.threads)
    from ..pipelines.load import load

    return load(
        options.model,
        device=options.device,
        dtype=options.dtype,
        encoders=options.encoders,
        vae=options.vae,
        tokenizers=options.tokenizers,
        variant=options.variant,
        offload=options.offload,
    )


def asked(options: argparse.Namespace) -> "ImageArguments":
    """The arguments of the pipeline that the options above stand for."""
    width, height = options.size or (None, None)
    of_some: ImageArguments = {} if options.true_cfg is None else {"true_cfg_scale": options.true_cfg}
    return of_some | {
        "negative_prompt": options.negative,
        "width": width,
        "height": height,
        "num_inference_steps": options.steps,
        "guidance_scale": options.guidance,
        "num_images_per_prompt": options.count,
        "seed": options.seed,
        "sampler": options.sampler,
    }


def _add_part_options(parser: argparse.ArgumentParser) -> None:
    """Where parts are that --model lacks, and where weights stay."""
    whole = "a folder in diffusers' layout, or a hub id"
    parser.add_argument("--encoders", metavar="PATH", help=f"text encoders that --model lacks: {whole}, or a file")
    parser.add_argument("--vae", metavar="PATH", help=f"the autoencoder that --model lacks: {whole}, or a file")
    parser.add_argument(
        "--tokenizers", metavar="PATH", help=f"tokenizers that --model lacks: {whole} (default: beside the encoders)"
    )
    parser.add_argument("--variant", help='of the weights where parts come in several, such as "fp16"')
    parser.add_argument(
        "--offload",
        choices=("none", "encoders", "blocks"),
        help="weights that stay in their files until they are used: none (default), text encoders, or also the "
        "denoiser's blocks",
    )
