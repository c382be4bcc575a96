"""Tokenizers: text to ids and back, over a `tokenizers` file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Ids of the tokens that no text produces; `expand` (None: the model has none) stands between a short prompt and
    its expansion.
    """

    pad: int
    bos: int
    eos: int
    expand: int | None = None


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Text to ids. Special tokens written out in a text are plain text: a prompt cannot end itself."""

    raw: "RawTokenizer"
    special: SpecialTokens

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self.raw.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens.

        Raises:
            ValueError: not a text, or one with half a character (a lone surrogate).
        """
        if not isinstance(cast(object, text), str) or any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"the prompt is {text!a}; it must be a string of whole characters")
        return self.raw.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out, without the space that stands before a text's first word."""
        return self.raw.decode(list(ids), skip_special_tokens=True).removeprefix(" ")


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json` with the special tokens <pad>, <bos>, <eos> and, where it has it, <expand>.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a tokenizer file, or a special token is missing.
    """
    from tokenizers import Tokenizer as RawTokenizer

    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer file at {path}")
    try:
        raw = RawTokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is not a tokenizer file ({error})") from error
    raw.encode_special_tokens = True
    pad, bos, eos = (_special(raw, name, path) for name in ("<pad>", "<bos>", "<eos>"))
    return Tokenizer(raw=raw, special=SpecialTokens(pad=pad, bos=bos, eos=eos, expand=raw.token_to_id("<expand>")))


def _special(raw: "RawTokenizer", name: str, path: Path) -> int:
    index = raw.token_to_id(name)
    if index is None:
        raise ValueError(f"{path} has no {name} token; it needs <pad>, <bos> and <eos>")
    return index
