"""Ids to text while they come, and the strings that end it."""

import codecs
import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .byte_level import byte_alphabet

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

    from .tokenizer import TextTokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokeniser:
    """The text of ids that come one at a time, without special tokens: the pieces join to what `tokenizer.decode` gives
    for all the ids. A piece never ends inside a character: its bytes wait for the rest. Each token costs the same.

    With `after`, the text continues that of these ids: a space that a tokenizer drops at the start of a text stays, and
    a character begun there ends here. Exact for byte-level, SentencePiece and byte-fallback tokenizers. A run of byte
    tokens (byte fallback) waits for the next token of another kind, which decides whether the run is valid text.
    """

    def __init__(self, tokenizer: "TextTokenizer", after: Sequence[int] = ()) -> None:
        self._special = tokenizer.special_ids
        self._stream = _stream(tokenizer.raw)
        for token_id in after:
            self.add(token_id)

    def add(self, token_id: int) -> str:
        """The text that this token finishes; empty for special tokens and ids outside the vocabulary."""
        return "" if token_id in self._special else self._stream.add(token_id)

    def finish(self) -> str:
        """What was held back: the replacement characters of a character that never became whole."""
        return self._stream.finish()


class StopMatcher:
    """Lets text through up to the first string of `stops`, which is never shown, nor anything after it. Text that may
    be the start of one is held back. The first is the one that ends first (of several, the longest), so that it does
    not matter how the text is cut into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """The text that can be shown now."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = len(text) - self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What is held back, at the end of the text: it was no stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


class _Stream(Protocol):
    def add(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(kw_only=True)
class _Start:
    """Takes at most `count` characters `content` off the start of a text in pieces."""

    content: str = ""
    count: int = 0

    def strip(self, text: str) -> str:
        while self.count and text:
            if not text.startswith(self.content):
                self.count = 0
                break
            text, self.count = text[1:], self.count - 1
        return text


class _ByteStream:
    """Byte-level BPE: every token is bytes; what is not UTF-8 becomes replacement characters."""

    def __init__(self, raw: "RawTokenizer", start: _Start) -> None:
        self._raw, self._start = raw, start
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        token = self._raw.id_to_token(token_id)
        return "" if token is None else self._start.strip(self._decoder.decode(_bytes_of(token)))

    def finish(self) -> str:
        return self._start.strip(self._decoder.decode(b"", final=True))


class _PieceStream:
    """SentencePiece: every token is text with a mark for spaces; a run of byte tokens is text if it is valid UTF-8, and
    else one replacement character per byte.
    """

    def __init__(self, raw: "RawTokenizer", plan: "_Plan") -> None:
        self._raw, self._plan, self._start = raw, plan, plan.start
        self._run, self._is_first = bytearray(), True

    def add(self, token_id: int) -> str:
        token = self._raw.id_to_token(token_id)
        if token is None:
            return ""
        for pattern, content, is_dropped_first in self._plan.replacements:
            token = token.replace(pattern, "" if is_dropped_first and self._is_first else content)
        self._is_first = False
        byte = _fallback_byte(token) if self._plan.has_bytes else None
        if byte is not None:
            self._run.append(byte)
            return ""
        return self.finish() + self._start.strip(token)

    def finish(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return self._start.strip(run.decode())
        except UnicodeDecodeError:
            return self._start.strip(_REPLACEMENT * len(run))


class _WindowStream:
    """Any other decoder: what the last tokens' text gains by one more token. Right where a token's text does not change
    that of tokens before it.
    """

    def __init__(self, raw: "RawTokenizer") -> None:
        self._raw = raw
        self._window: list[int] = []
        self._shown = ""

    def add(self, token_id: int) -> str:
        if self._raw.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        text = self._raw.decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) < 8:
            return ""
        new = text[len(self._shown) :]
        self._window = self._window[-1:]
        self._shown = self._raw.decode(self._window)
        return new

    def finish(self) -> str:
        return self._raw.decode(self._window)[len(self._shown) :]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A decoder in parts: (text, what stands for it, whether nothing does in the first token), byte tokens, start."""

    replacements: tuple[tuple[str, str, bool], ...]
    has_bytes: bool
    start: _Start


def _stream(raw: "RawTokenizer") -> _Stream:
    steps = _steps(json.loads(raw.decoder.__getstate__())) if raw.decoder is not None else []
    kinds = [step["type"] for step in steps]
    start = _Start()
    if kinds and kinds[-1] == "Strip" and steps[-1]["stop"] == 0 and {"Fuse", "ByteLevel"} & {*kinds[-2:-1]}:
        start = _Start(content=steps[-1]["content"], count=steps[-1]["start"])
        kinds = kinds[:-1]
    kinds = kinds[:-1] if kinds[-1:] == ["Fuse"] else kinds
    if kinds == ["ByteLevel"]:
        return _ByteStream(raw, start)
    has_bytes = kinds[-1:] == ["ByteFallback"]
    pieces = [_replacement(step) for step in steps[: len(kinds) - has_bytes]]
    replacements = tuple(piece for piece in pieces if piece is not None)
    if not kinds or len(replacements) < len(pieces):
        return _WindowStream(raw)
    return _PieceStream(raw, _Plan(replacements=replacements, has_bytes=has_bytes, start=start))


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _replacement(step: dict[str, Any]) -> tuple[str, str, bool] | None:
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"], False
    if step["type"] == "Metaspace":
        return step["replacement"], " ", step["prepend_scheme"] != "never"
    return None


def _fallback_byte(token: str) -> int | None:
    """The byte that a token such as <0x0A> stands for."""
    if len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _bytes_of(token: str) -> bytes:
    """The bytes of a byte-level token; a token with other characters than those for bytes is its own text."""
    table = _byte_of_character()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode()


@functools.cache
def _byte_of_character() -> dict[str, int]:
    return {character: byte for byte, character in byte_alphabet().items()}
