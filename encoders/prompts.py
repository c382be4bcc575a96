"""Prompts as tokens of one of transformers' tokenizers: checked, and told about where they are cut."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """A prompt's `ids` without marks, and where in `text` each one starts and ends."""

    text: str
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    def left_out(self, room: int, reader: str) -> str | None:
        """What to tell the user if a reader of `room` tokens cannot take it all: the words that it does not see."""
        if len(self.ids) <= room:
            return None
        words = self.text[self.spans[room][0] :].strip()
        shown = words if len(words) <= SHOWN else f"{words[:SHOWN]}..."
        return f"the prompt has {len(self.ids)} tokens and {reader} reads {room}; left out: {shown!r}"

    @property
    def places(self) -> tuple[int, ...]:
        """For each token the place of its last character in the text: a space before a word may belong to its token."""
        return tuple(max(start, stop - 1) for start, stop in self.spans)


def token_rows(tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str]) -> list[TokenRow]:
    """The prompts' tokens. Special tokens written out in a prompt are the tokens, as transformers reads every text.

    Raises:
        ValueError: no prompts, or one that is not a string of whole characters.
    """
    texts = checked_prompts(prompts)
    encode = cast(Any, tokenizer)
    if not encode.is_fast:
        return [_byte_row(encode, text) for text in texts]
    encoded = encode(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    pairs = zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [TokenRow(text=text, ids=tuple(ids), spans=tuple(spans)) for text, ids, spans in pairs]


def _byte_row(tokenizer: Any, text: str) -> TokenRow:
    """The tokens of a text for ByT5's tokenizer, which does not tell where they are: a byte each, or a special one."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    sizes = (1 if len(token) == 1 else len(token.encode()) for token in tokenizer.convert_ids_to_tokens(ids))
    characters = [*(place for place, letter in enumerate(text) for _ in letter.encode()), len(text)]
    ends = [characters[min(end, len(characters) - 1)] for end in accumulate(sizes, initial=0)]
    return TokenRow(text=text, ids=tuple(ids), spans=tuple(pairwise(ends)))


def warnings_of(rows: Iterable[TokenRow], room: int, reader: str) -> tuple[str, ...]:
    """One warning for each different prompt that is cut."""
    found = (row.left_out(room, reader) for row in rows)
    return tuple(dict.fromkeys(each for each in found if each is not None))


def special_ids(tokenizer: "PreTrainedTokenizerBase", names: Sequence[str], num_embeddings: int) -> list[int]:
    """The ids of special tokens ("bos", "eos", "pad"), after a check that model and tokenizer belong together.

    Raises:
        ValueError: the tokenizer has no such token, or more ids than the model has embeddings.
    """
    if len(cast(Any, tokenizer)) > num_embeddings:
        raise ValueError(
            f"the tokenizer has {len(cast(Any, tokenizer))} ids, but the text encoder has embeddings for"
            f" {num_embeddings} only; they do not belong together"
        )
    tokens = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    for name in names:
        if not isinstance(cast(object, tokens[name]), int):
            raise ValueError(f"the tokenizer has no {name} token, which this text encoder needs")
    return [cast(int, tokens[name]) for name in names]


def checked_prompts(prompts: Sequence[str]) -> list[str]:
    """The prompts as a list.

    Raises:
        ValueError: no prompts, or one that is not a string of whole characters.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts is the string {prompts!r}; it must be a list of strings")
    if not prompts:
        raise ValueError("no prompts to encode; give at least one (it may be empty)")
    for prompt in cast(Sequence[object], prompts):
        if not isinstance(prompt, str) or any("\ud800" <= character <= "\udfff" for character in prompt):
            raise ValueError(f"the prompt is {prompt!a}; it must be a string of whole characters")
    return list(prompts)
