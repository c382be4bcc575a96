"""Output that must match a JSON schema or a regular expression: which tokens may come next, by `llguidance`."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .tokenizer import TextTokenizer

# Between the parts of a JSON text: nothing, a space, or a new line and its indentation. More would let models dally.
_WHITESPACE = r"( |\n {0,24})?"


class Constraint:
    """What one request's text may be, and how far it has come. The text is complete when a token of the tokenizer's
    ends is accepted; these are allowed only where the text may end.
    """

    def __init__(self, grammar: str, tokenizer: "TextTokenizer") -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(tokenizer.grammar_tokenizer, grammar, log_level=0)
        self._check()

    def mask(self) -> Tensor:
        """Which tokens may come next: [V] bool on the CPU, V the tokenizer's ids."""
        return torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8).bool()

    def accept(self, token_id: int) -> None:
        """Go on by one token.

        Raises:
            ValueError: a token that may not come here. The constraint cannot be used after it.
        """
        if not self._matcher.consume_token(token_id):
            raise ValueError(f"token {token_id} may not come here ({_first_line(self._matcher.get_error())})")

    @property
    def is_complete(self) -> bool:
        """Whether the text so far matches; it may still allow more."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether the text matches and only an end token may follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"the constraint cannot be used ({_first_line(self._matcher.get_error())})")


def json_constraint(schema: str | Mapping[str, Any], tokenizer: "TextTokenizer") -> Constraint:
    """A JSON text that is valid under a JSON schema (text or mapping).

    Raises:
        ValueError: not a JSON schema, one with keywords that cannot be enforced, or a tokenizer that cannot be used.
    """
    return Constraint(check_json_schema(schema), tokenizer)


def regex_constraint(pattern: str, tokenizer: "TextTokenizer") -> Constraint:
    """A text that a regular expression matches as a whole (the syntax of Rust's `regex`: no look-around, no
    back-references; `\\d` and `\\w` are those of Unicode).

    Raises:
        ValueError: the pattern does not compile, or a tokenizer that cannot be used.
    """
    return Constraint(check_regex(pattern), tokenizer)


def check_json_schema(schema: str | Mapping[str, Any]) -> str:
    """The grammar of a JSON schema.

    Raises:
        ValueError: not a JSON schema, or one with keywords that cannot be enforced.
    """
    from llguidance import LLMatcher

    text = schema if isinstance(schema, str) else _dumped(schema)
    try:
        parsed = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"json_schema {_short(text)} is not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"json_schema is {_short(text)}; it must be a JSON object, such as {{'type': 'object'}}")
    what = f"json_schema {_short(text)} is not a JSON schema that can be enforced"
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITESPACE})
    except ValueError as error:  # what its reader of JSON refuses, such as half a character
        raise ValueError(f"{what}: {error}") from error
    _check_grammar(grammar, what)
    return grammar


def check_regex(pattern: str) -> str:
    """The grammar of a regular expression.

    Raises:
        ValueError: the pattern does not compile.
    """
    from llguidance import LLMatcher

    if type(pattern) is not str or not pattern or any("\ud800" <= each <= "\udfff" for each in pattern):
        raise ValueError(f"regex is {pattern!a}; it must be a pattern of at least one whole character")
    grammar = LLMatcher.grammar_from_regex(pattern)
    _check_grammar(grammar, f"regex {_short(pattern)} does not compile")
    return grammar


def _check_grammar(grammar: str, what: str) -> None:
    from llguidance import LLMatcher

    message = LLMatcher.validate_grammar(grammar)
    if message and not message.startswith("WARNING"):
        raise ValueError(f"{what}: {' '.join(message.split())}")


def _dumped(schema: object) -> str:
    if not isinstance(schema, Mapping):
        raise ValueError(f"json_schema is {_short(repr(schema))}; it must be a mapping, or the text of a JSON object")
    try:
        return json.dumps(dict(cast(Mapping[str, Any], schema)), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema is {_short(repr(schema))}; it must be JSON data ({error})") from error


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _first_line(message: str) -> str:
    return message.splitlines()[0] if message else "no reason given"
