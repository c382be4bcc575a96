"""`calotype chat`: a conversation with a language model, line by line."""

import argparse
import sys
from typing import TYPE_CHECKING

from .common import Commands, complain, use_threads
from .sampling import (
    add_language_model_options,
    add_sampling_options,
    check_chat_model,
    load_model,
    sampling_options,
)

if TYPE_CHECKING:
    from ..language.conversation import Conversation
    from ..language.sampling import SamplingOptions

MAX_TOKENS = 512
TEMPERATURE = 0.7
HELP = "/new starts again, /stats tells how fast the last answer was, /quit ends (as does the end of the input)"


def add_to(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "chat",
        help="talk with a language model",
        description=f"Answers every line of the input; the model remembers what was said. {HELP}.",
        allow_abbrev=False,
    )
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    add_sampling_options(parser, MAX_TOKENS, TEMPERATURE)
    add_language_model_options(parser, "the chat model: a folder, a .gguf file or a hub id (the bundled one is none)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Reads lines until the end of the input."""
    check_chat_model(options)
    use_threads(options.threads)
    sampling = sampling_options(options)
    model = load_model(options)
    model.tokenizer.template_for()
    from ..language.conversation import Conversation

    talk = Conversation(model, system=options.system)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        complain(f"{model.name}; {HELP}")
    while (line := _next_line(is_terminal)) is not None:
        if line == "/quit":
            break
        if line == "/new":
            talk = Conversation(model, system=options.system)
        elif line == "/stats":
            _tell_figures(talk)
        elif line:
            _answer(talk, line, sampling)
    return 0


def _next_line(is_terminal: bool) -> str | None:
    if is_terminal:
        sys.stderr.write("> ")
        sys.stderr.flush()
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise ValueError(f"the input is not valid text in this terminal's encoding: {error}") from None
    return line.strip() if line else None


def _answer(talk: "Conversation", line: str, sampling: "SamplingOptions") -> None:
    """Writes the answer as it comes; one that is interrupted is forgotten."""
    try:
        for piece in talk.say(line, **sampling):
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        complain("interrupted: this answer is forgotten; /quit ends")
    sys.stdout.write("\n")
    sys.stdout.flush()


def _tell_figures(talk: "Conversation") -> None:
    if talk.last is None:
        complain("no answer yet")
        return
    timings = talk.last.timings
    rate = "" if timings.tokens_per_second is None else f", then {timings.tokens_per_second:.1f} tokens/s"
    complain(
        f"{len(talk.last.token_ids)} tokens after {timings.num_prompt_tokens}; first after "
        f"{timings.first_token_seconds:.2f} s{rate}; {timings.kv_cache_bytes / 1e6:.1f} MB of keys and values"
    )
