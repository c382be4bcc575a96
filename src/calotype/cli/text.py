"""`calotype text PROMPT`: completes or expands a prompt with the bundled language model."""

import argparse
import sys

from .common import Commands, add_model_options, count, use_threads, warn, words

MAX_TOKENS = 48


def add_to(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "text",
        help="complete or expand a prompt",
        description="Goes on where a prompt ends; with --expand, turns a short prompt into a fuller one. "
        "Prints the text alone.",
        allow_abbrev=False,
    )
    parser.add_argument("prompt", nargs="+", metavar="PROMPT", help="how the text begins; words need no quotes")
    parser.add_argument("--expand", action="store_true", help="a fuller description of what the prompt names")
    parser.add_argument(
        "--max-tokens", type=count, default=MAX_TOKENS, help=f"at most this many new tokens (default {MAX_TOKENS})"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0: the likeliest text; 1: as varied as it was learnt"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="same seed, same text (matters from --temperature above 0 on)"
    )
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the text."""
    prompt = words(options.prompt)
    use_threads(options.threads)
    from ..language.generate import Sampling
    from ..pipelines.load import load_language_model

    sampling = Sampling(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
    if options.seed and not options.temperature:
        warn("--seed changes nothing at temperature 0: add --temperature 1")
    model = load_language_model(options.model, device=options.device, dtype=options.dtype)
    generate = model.expand if options.expand else model.generate
    completion = generate(prompt, max_tokens=sampling.max_tokens, temperature=sampling.temperature, seed=sampling.seed)
    sys.stdout.write(f"{completion.text.strip() if options.expand else prompt + completion.text}\n")
    if completion.finish_reason == "length":
        warn(f"stopped after {len(completion.token_ids)} tokens: the text may go on (--max-tokens)")
    return 0
