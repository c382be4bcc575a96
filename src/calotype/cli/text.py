"""`calotype text PROMPT`: completes, answers or expands a prompt with a language model."""

import argparse
import sys

from .common import Commands, use_threads, warn, words
from .sampling import (
    add_language_model_options,
    add_sampling_options,
    check_chat_model,
    load_model,
    sampling_options,
)

MAX_TOKENS = 48


def add_to(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "text",
        help="complete, answer or expand a prompt",
        description="Goes on where a prompt ends; with --chat, answers it; with --expand, turns a short prompt into a "
        "fuller one. Prints the text alone, as it comes.",
        allow_abbrev=False,
    )
    parser.add_argument("prompt", nargs="+", metavar="PROMPT", help="how the text begins; words need no quotes")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--expand", action="store_true", help="a fuller description of what the prompt names")
    kind.add_argument("--chat", action="store_true", help="an answer to the prompt, for models trained to chat")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: what the model is told first")
    add_sampling_options(parser, MAX_TOKENS, 0.0)
    add_language_model_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the text."""
    prompt = words(options.prompt)
    use_threads(options.threads)
    sampling = sampling_options(options)
    if options.seed and not options.temperature:
        warn("--seed changes nothing at temperature 0: add --temperature 1")
    if options.system is not None and not options.chat:
        raise ValueError("--system is for --chat")
    if options.chat:
        check_chat_model(options)
    model = load_model(options)
    if options.expand:
        completion = model.expand(prompt, **sampling)
        sys.stdout.write(f"{completion.text.strip()}\n")
        _remark_on_length(len(completion.token_ids), completion.finish_reason == "length")
        return 0
    messages = [{"role": "user", "content": prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    pieces = model.stream(messages if options.chat else prompt, **sampling)
    sys.stdout.write("" if options.chat else prompt)
    count, ended = 0, False
    for piece in pieces:
        sys.stdout.write(piece.text)
        sys.stdout.flush()
        count, ended = count + 1, piece.is_end
    sys.stdout.write("\n")
    _remark_on_length(count, not ended)
    return 0


def _remark_on_length(count: int, is_cut: bool) -> None:
    if is_cut:
        warn(f"stopped after {count} tokens: the text may go on (--max-tokens)")
