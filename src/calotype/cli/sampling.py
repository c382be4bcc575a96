"""The options that commands which write text share."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .common import BUNDLED_HELP, add_model_options, count

CHAT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

if TYPE_CHECKING:
    from ..language.sampling import SamplingOptions
    from ..language.text import TextModel


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int, temperature: float) -> None:
    """How tokens are chosen."""
    group = parser.add_argument_group("choosing tokens")
    group.add_argument(
        "--max-tokens", type=count, default=max_tokens, help=f"at most this many new tokens (default {max_tokens})"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        help=f"0: the likeliest text; 1: as varied as it was learnt (default {temperature:g})",
    )
    group.add_argument("--top-k", type=int, metavar="N", help="only the N likeliest tokens")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest tokens that hold P")
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="only tokens P times as likely as the best"
    )
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="over 1: less repetition")
    group.add_argument(
        "--seed", type=int, default=0, help="same seed, same text (matters from --temperature above 0 on)"
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this; may come again")
    group.add_argument("--json-schema", metavar="FILE", help="answer in JSON that is valid under this schema")
    group.add_argument("--regex", help="answer with a text that matches this regular expression")


def add_language_model_options(parser: argparse.ArgumentParser, source: str = BUNDLED_HELP) -> None:
    """Which model (`source` is the help of --model), and how it is kept."""
    add_model_options(parser, source)
    parser.add_argument(
        "--packed",
        choices=("int8", "int4", "w8a8"),
        help="keep the weights in 8 or 4 bits, an approximation; w8a8 is the fastest, and rounds activations too",
    )
    parser.add_argument("--revision", help="of a model on the hub")
    parser.add_argument("--offline", action="store_true", help="never download anything")


def check_chat_model(options: argparse.Namespace) -> None:
    """Makes sure that a model is named. ValueError otherwise."""
    if options.model is None:
        raise ValueError(
            "the bundled language model completes and expands prompts, and was never trained to chat: name a chat "
            f"model, as in --model {CHAT_MODEL}"
        )


def sampling_options(options: argparse.Namespace) -> "SamplingOptions":
    """The given options by the names that the library has for them, checked.

    Raises:
        ValueError: one is out of range. OSError: the schema's file cannot be read.
    """
    from ..language.sampling import SamplingOptions, sampling_from

    given = SamplingOptions(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        stop=tuple(options.stop),
        json_schema=None if options.json_schema is None else _schema(Path(options.json_schema)),
        regex=options.regex,
    )
    sampling_from(given)
    return given


def load_model(options: argparse.Namespace) -> "TextModel":
    """The language model that the options name."""
    from ..pipelines.load_text import load_language_model

    return load_language_model(
        options.model,
        device=options.device,
        dtype=options.dtype,
        packed=options.packed,
        revision=options.revision,
        local_files_only=options.offline,
    )


def _schema(path: Path) -> Any:
    try:
        schema: object = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"{path} holds no JSON object, as a JSON schema is")
    return cast(Any, schema)
