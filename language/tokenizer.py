"""Tokenizers: text to ids and back, over a `tokenizers` file."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer as RawTokenizer

_SLOW_FILES = ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model", "spiece.model")


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
        _check_text(text)
        return self.raw.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out, without the space that stands before a text's first word."""
        return self.raw.decode(list(ids), skip_special_tokens=True).removeprefix(" ")


@dataclass(frozen=True, kw_only=True, eq=False)
class TextTokenizer:
    """The tokenizer of a language model. `bos`, `eos` (every token that ends a text) and `pad` are ids, where the model
    has them. `chat_template` writes chats; `named_templates` are others by name, of which "tool_use" is taken for chats
    with tools. `special_tokens` are the texts of special tokens under the names that templates use ("bos_token", ...).
    """

    raw: "RawTokenizer"
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    chat_template: str | None = None
    named_templates: Mapping[str, str] = field(default_factory=dict[str, str])
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self.raw.get_vocab_size()

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode` leaves out."""
        return frozenset(token for token, added in self.raw.get_added_tokens_decoder().items() if added.special)

    @functools.cached_property
    def template_tokens(self) -> dict[str, str]:
        """What templates get: `special_tokens`, and those that follow from `bos`, `eos` and `pad`."""
        ids = {"bos_token": self.bos, "eos_token": self.eos[0] if self.eos else None, "pad_token": self.pad}
        texts = {name: self.raw.id_to_token(token) for name, token in ids.items() if token is not None}
        return {**{name: text for name, text in texts.items() if text is not None}, **self.special_tokens}

    @functools.cached_property
    def grammar_tokenizer(self) -> "LLTokenizer":
        """The vocabulary as constrained output needs it (a second or so for a large one, once).

        Raises:
            ValueError: no end token, or a kind of tokenizer whose tokens have no bytes of their own.
        """
        from llguidance import LLTokenizer

        if not self.eos:
            raise ValueError("this tokenizer names no end token; constrained output needs one")
        try:
            return LLTokenizer(json.dumps(_as_continued(json.loads(self.raw.to_str()))), eos_token=list(self.eos))
        except ValueError as error:
            raise ValueError(f"constrained output does not work with this tokenizer ({error})") from error

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of a text, with the marks that the tokenizer's post-processor adds where `add_special_tokens`.

        Special tokens written out in the text are plain text by default, so that no prompt can end itself or play
        another role. With `parse_special` they are the tokens, as transformers reads every text: right for text that a
        chat template wrote.

        Raises:
            ValueError: not a text, or one with half a character (a lone surrogate).
        """
        _check_text(text)
        plain = not parse_special and self._special_pattern.search(text) is not None
        return (self._plain if plain else self.raw).encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids, as the tokenizer's decoder gives it (with no clean-up of spaces before punctuation)."""
        return self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def template_for(self, *, tools: bool = False, name: str | None = None) -> str:
        """The chat template: that of this name, else "tool_use" for chats with tools where there is one, else
        `chat_template`.

        Raises:
            ValueError: no such template.
        """
        if name is not None and name != "default":
            if name not in self.named_templates:
                raise ValueError(f"no chat template {name!r}; there are {sorted({*self.named_templates, 'default'})}")
            return self.named_templates[name]
        if tools and name is None and "tool_use" in self.named_templates:
            return self.named_templates["tool_use"]
        if self.chat_template is None:
            others = f"only {sorted(self.named_templates)}, by name" if self.named_templates else "give a plain prompt"
            raise ValueError(f"this tokenizer has no chat template: {others}")
        return self.chat_template

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        texts = [added.content for added in self.raw.get_added_tokens_decoder().values() if added.special]
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)", re.IGNORECASE)

    @functools.cached_property
    def _plain(self) -> "RawTokenizer":
        """A second one that reads special tokens as text; made when a text first has one."""
        from tokenizers import Tokenizer as RawTokenizer

        raw = RawTokenizer.from_str(self.raw.to_str())
        raw.encode_special_tokens = True
        return raw


def _as_continued(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries of a byte-level tokenizer's file without what it does to the start of a text, or to its letters: the
    pieces of an answer that goes on stand as they are.
    """
    before: dict[str, Any] = entries.get("pre_tokenizer") or {}
    steps = [step for step in [before, *before.get("pretokenizers", [])] if step.get("type") == "ByteLevel"]
    for step in steps:
        step["add_prefix_space"] = False
    return entries | {"normalizer": None} if steps else entries


def text_tokenizer_of(tokenizer: Tokenizer) -> TextTokenizer:
    """The bundled kind of tokenizer as any language model's: `<bos>` starts a text, `<eos>` ends it, and a text's first
    word has no space before it.
    """
    from tokenizers import Tokenizer as RawTokenizer
    from tokenizers import decoders, processors

    raw, special = RawTokenizer.from_str(tokenizer.raw.to_str()), tokenizer.special
    raw.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", special.bos)])
    raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return TextTokenizer(raw=raw, bos=special.bos, eos=(special.eos,), pad=special.pad)


def load_text_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer of a folder in transformers' layout: `tokenizer.json` as it is (its post-processor decides which
    marks a text gets), or else what transformers makes of a SentencePiece or vocabulary file; special tokens of
    `tokenizer_config.json` and `special_tokens_map.json`, further end tokens of `generation_config.json` (or
    `config.json`), and the chat templates.

    Raises:
        FileNotFoundError: no such folder, or no tokenizer in it.
        ValueError: a file that cannot be read, or a token whose id differs between the files.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder at {folder}")
    settings = _read_json(folder / "tokenizer_config.json")
    raw, names = _raw_of(folder)
    names |= _named_tokens(settings, _read_json(folder / "special_tokens_map.json"))
    _add_tokens(raw, settings, names, folder)
    generation = _read_json(folder / "generation_config.json")
    model = _read_json(folder / "config.json")
    eos = [*_ids(raw.token_to_id(names.get("eos_token", "")), "eos_token"), *_given(generation, model, "eos_token_id")]
    templates = _templates(folder, settings)
    return TextTokenizer(
        raw=raw,
        bos=raw.token_to_id(names["bos_token"]) if "bos_token" in names else _one(generation, model, "bos_token_id"),
        eos=tuple(dict.fromkeys(eos)),
        pad=raw.token_to_id(names["pad_token"]) if "pad_token" in names else _one(generation, model, "pad_token_id"),
        chat_template=templates.pop("default", None),
        named_templates=templates,
        special_tokens=names,
    )


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json` with the special tokens <pad>, <bos>, <eos> and, where it has it, <expand>.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a tokenizer file, or a special token is missing.
    """
    raw = _read_raw(path)
    raw.encode_special_tokens = True
    pad, bos, eos = (_special(raw, name, path) for name in ("<pad>", "<bos>", "<eos>"))
    return Tokenizer(raw=raw, special=SpecialTokens(pad=pad, bos=bos, eos=eos, expand=raw.token_to_id("<expand>")))


def _special(raw: "RawTokenizer", name: str, path: Path) -> int:
    index = raw.token_to_id(name)
    if index is None:
        raise ValueError(f"{path} has no {name} token; it needs <pad>, <bos> and <eos>")
    return index


def _read_raw(path: Path) -> "RawTokenizer":
    from tokenizers import Tokenizer as RawTokenizer

    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer file at {path}")
    try:
        return RawTokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is not a tokenizer file ({error})") from error


def _check_text(text: object) -> None:
    if not isinstance(text, str) or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"the prompt is {text!a}; it must be a string of whole characters")


def _raw_of(folder: Path) -> tuple["RawTokenizer", dict[str, str]]:
    """The folder's tokenizer, without truncation and padding, and the special tokens known with it."""
    path = folder / "tokenizer.json"
    if path.is_file():
        raw, names = _read_raw(path), dict[str, str]()
    elif any((folder / name).is_file() for name in _SLOW_FILES):
        raw, names = _converted(folder)
    else:
        raise FileNotFoundError(f"no tokenizer in {folder}; it needs tokenizer.json or one of {', '.join(_SLOW_FILES)}")
    raw.no_truncation()
    raw.no_padding()
    return raw, names


def _converted(folder: Path) -> tuple["RawTokenizer", dict[str, str]]:
    from transformers import AutoTokenizer

    try:
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(str(folder), local_files_only=True)
        return tokenizer.backend_tokenizer, dict(tokenizer.special_tokens_map)
    except Exception as error:  # whatever the many converters raise
        raise ValueError(f"transformers cannot convert the tokenizer in {folder} ({error})") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The entries of a JSON file; none where there is no file."""
    if not path.is_file():
        return {}
    try:
        entries: object = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{path} does not hold named entries")
    return cast(dict[str, Any], entries)


def _named_tokens(settings: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens by name. Where the settings do not list all added tokens (the older layout), the
    special tokens' own file goes first, as in transformers.
    """
    merged = {**special, **settings} if "added_tokens_decoder" in settings else {**settings, **special}
    extra = merged.get("extra_special_tokens")
    if isinstance(extra, dict):
        merged |= cast(dict[str, Any], extra)
    texts = {name: _content(entry) for name, entry in merged.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _content(token: Any) -> str | None:
    """The text of a token, written as such or as an entry with its properties; None for what is no token."""
    content: Any = cast(dict[str, Any], token).get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _add_tokens(raw: "RawTokenizer", settings: Mapping[str, Any], names: Mapping[str, str], folder: Path) -> None:
    """Add the tokens that only the settings have, as transformers does."""
    from tokenizers import AddedToken

    known = {added.content for added in raw.get_added_tokens_decoder().values()}
    try:
        listed = {int(n): AddedToken(**entry) for n, entry in (settings.get("added_tokens_decoder") or {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{folder}: added_tokens_decoder of tokenizer_config.json makes no sense ({error})") from error
    for token, added in sorted(listed.items(), key=lambda item: item[0]):
        content = added.content
        if content not in known:
            raw.add_tokens([added])
            known.add(content)
        if raw.token_to_id(content) != token:
            found = f"{raw.token_to_id(content)} in the vocabulary"
            raise ValueError(f"{folder}: token {content!r} is {token} in tokenizer_config.json but {found}")
    extra: Any = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    others = [*names.values(), *(map(_content, cast(list[Any], extra)) if isinstance(extra, list) else ())]
    new = dict.fromkeys(text for text in others if text and text not in known)
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in new])


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files of their own go before the settings; `chat_template.json` is that of processors."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    found = {name: _read_text(path) for name, path in files.items() if path.is_file()}
    if found:
        return found
    entry = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(entry, list):
        try:
            return {str(each["name"]): str(each["template"]) for each in cast(list[dict[str, Any]], entry)}
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder}: the chat templates are not a list of names and templates") from error
    if isinstance(entry, dict):
        return {str(name): str(template) for name, template in cast(dict[str, Any], entry).items()}
    return {} if entry is None else {"default": str(entry)}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error})") from error


def _given(generation: Mapping[str, Any], model: Mapping[str, Any], name: str) -> list[int]:
    """The ids of an entry of the generation settings or, where there are none, of the model's."""
    return _ids((generation or model).get(name), name)


def _ids(entry: Any, name: str) -> list[int]:
    """Ids written as a number, a list or nothing."""
    found = [] if entry is None else cast(list[Any], entry if isinstance(entry, list) else [entry])
    if any(type(token) is not int for token in found):
        raise ValueError(f"the {name} of generation_config.json or config.json is {entry!r}; it must be an id or ids")
    return found


def _one(generation: Mapping[str, Any], model: Mapping[str, Any], name: str) -> int | None:
    ids = _given(generation, model, name)
    return ids[0] if ids else None
