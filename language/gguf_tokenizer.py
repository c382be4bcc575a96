"""The tokenizer that a GGUF file's metadata describes.

How texts are cut before merging is llama.cpp's and the models' own (`llama-vocab.cpp`, their tokenizer.json). Where
transformers' conversion leaves parts of it out - digits one by one for "smollm", NFC for "qwen2", whole words first and
a start mark for "llama-bpe" - they are here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from .byte_level import byte_alphabet
from .tokenizer import TextTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

_Merges: TypeAlias = list[tuple[str, str]]
_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORD + r"\p{N}{1,3}" + _REST
_QWEN2 = _WORD + r"\p{N}" + _REST
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
}
_GPT2 = ("default", "gpt-2", "gpt2", "phi-2", "olmo", "mpt")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
_START_MARK = ("llama-bpe", "llama3", "llama-v3", "tekken")
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end an answer, whether or not the file says so (as in llama.cpp)."""


def gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> TextTokenizer:
    """The tokenizer, with its special tokens and chat templates.

    Raises:
        ValueError: a kind of tokenizer that is not known, or lists that do not fit together.
    """
    tokens = _list(metadata, "tokens", path)
    if not tokens:
        raise ValueError(f"{path} has no tokenizer (tokenizer.ggml.tokens)")
    kind: object = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"{path}: a tokenizer of kind {kind!r} is not known; known are gpt2 (byte-level BPE), llama")
    kinds = _list(metadata, "token_type", path)
    if kinds and len(kinds) != len(tokens):
        raise ValueError(f"{path} is corrupted: it has {len(kinds)} kinds for {len(tokens)} tokens")
    try:
        raw = _byte_level(metadata, path) if kind == "gpt2" else _sentence_piece(metadata, path)
    except ValueError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is corrupted: its vocabulary makes no tokenizer ({error})") from error
    _add_special(raw, tokens, kinds)
    ids = _named_ids(metadata, tokens, path)
    _mark_ends(raw, metadata, {name: (tokens[index], index) for name, index in ids.items()})
    default, named = _templates(metadata)
    return TextTokenizer(
        raw=raw,
        bos=ids.get("bos"),
        eos=_ends(raw, ids),
        pad=ids.get("padding"),
        chat_template=default,
        named_templates=named,
        special_tokens={_NAMES[name]: tokens[index] for name, index in ids.items() if name in _NAMES},
    )


def _byte_level(metadata: Mapping[str, Any], path: Path) -> "RawTokenizer":
    from tokenizers import Tokenizer as RawTokenizer
    from tokenizers import decoders, models, normalizers

    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in (*_SPLITS, *_GPT2, *_DIGITS):
        known = ", ".join((*_SPLITS, *_GPT2, *_DIGITS))
        raise ValueError(f"{path}: the pre-tokenizer {pre!r} is not known; known are {known}")
    kinds = _list(metadata, "token_type", path)
    vocab = _vocabulary(_spelled(_list(metadata, "tokens", path), kinds), path)
    model = models.BPE(vocab=vocab, merges=_merges(metadata, path), ignore_merges=pre in _WHOLE_WORDS)
    raw = RawTokenizer(model)
    if _SPLITS.get(pre) == _QWEN2:
        raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = _pre_tokenizer(pre)
    raw.decoder = decoders.ByteLevel()
    return raw


def _pre_tokenizer(pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if pre in _SPLITS:
        cut = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return words


def _spelled(tokens: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """Tokens in the byte alphabet; some files write added ones as plain text. Control tokens stay as they are."""
    alphabet = byte_alphabet()
    letters = frozenset(alphabet.values())
    whole = [kind in (_CONTROL, _USER_DEFINED) for kind in kinds] or [False] * len(tokens)
    return [
        token if is_whole or letters.issuperset(token) else "".join(alphabet[byte] for byte in token.encode())
        for token, is_whole in zip(tokens, whole, strict=True)
    ]


def _sentence_piece(metadata: Mapping[str, Any], path: Path) -> "RawTokenizer":
    from tokenizers import Tokenizer as RawTokenizer
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    is_gemma = str(metadata.get("general.architecture")).startswith("gemma")
    tokens = _list(metadata, "tokens", path)
    if is_gemma:  # runs of spaces are stored as spaces
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    unknown: object = metadata.get("tokenizer.ggml.unknown_token_id")
    raw = RawTokenizer(
        models.BPE(
            vocab=_vocabulary(tokens, path),
            merges=_merges(metadata, path) or _derived_merges(tokens, _ranks(metadata, tokens, is_gemma, path)),
            unk_token=tokens[unknown] if type(unknown) is int and 0 <= unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_gemma:
        raw.normalizer = normalizers.Replace(" ", _SPACE)
        raw.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        has_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        scheme = "first" if has_space else "never"
        raw.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
        steps += [decoders.Strip(" ", 1, 0)] if has_space else []
    raw.decoder = decoders.Sequence(steps)
    return raw


def _ranks(metadata: Mapping[str, Any], tokens: Sequence[str], by_place: bool, path: Path) -> list[float]:
    """How early each token is merged, higher first: by its score, or (Gemma) by its place in the file."""
    if by_place:
        return [-float(place) for place in range(len(tokens))]
    scores = _list(metadata, "scores", path)
    if len(scores) != len(tokens):
        raise ValueError(f"{path} is corrupted: it has {len(scores)} scores for {len(tokens)} tokens")
    return scores


def _derived_merges(tokens: Sequence[str], ranks: Sequence[float]) -> _Merges:
    """All ways to join two tokens to a third, best first: SentencePiece keeps no list (as in transformers)."""
    ids = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in ids.items():
        cuts = ((token[:place], token[place:]) for place in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(ranks[index], len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [entry[3:] for entry in found]


def _vocabulary(tokens: Sequence[str], path: Path) -> dict[str, int]:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise ValueError(f"{path} is corrupted: the token {twice!r} occurs twice in its vocabulary")
    return vocab


def _merges(metadata: Mapping[str, Any], path: Path) -> _Merges:
    pairs = [tuple(merge.split(" ")) for merge in _list(metadata, "merges", path)]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{path} is corrupted: a merge of its vocabulary is not of two tokens")
    return cast(_Merges, pairs)


def _add_special(raw: "RawTokenizer", tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Control tokens are special; user-defined ones are only kept whole."""
    from tokenizers import AddedToken

    known = raw.get_vocab(with_added_tokens=False)
    marked = [(token, kind) for token, kind in zip(tokens, kinds, strict=False) if token in known]
    control = [token for token, kind in marked if kind == _CONTROL]
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    kept = [token for token, kind in marked if kind == _USER_DEFINED]
    raw.add_tokens([AddedToken(token, special=False, normalized=False) for token in kept])


def _named_ids(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> dict[str, int]:
    """The tokens that the file names by their purpose."""
    found: dict[str, int] = {}
    for name in (*_NAMES, "eot", "eom"):
        index: object = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is None:
            continue
        if type(index) is not int or not 0 <= index < len(tokens):
            raise ValueError(f"{path} is corrupted: {name}_token_id is {index!r}, of {len(tokens)} tokens")
        found[name] = index
    return found


def _mark_ends(raw: "RawTokenizer", metadata: Mapping[str, Any], named: Mapping[str, tuple[str, int]]) -> None:
    """A text's start and end marks, where the file, or the kind of tokenizer, wants them."""
    from tokenizers import processors

    starts = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _START_MARK
    first = named.get("bos") if metadata.get("tokenizer.ggml.add_bos_token", starts) else None
    last = named.get("eos") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    parts = [*([first[0]] if first else []), "$A", *([last[0]] if last else [])]
    marks = [mark for mark in dict.fromkeys((first, last)) if mark is not None]
    raw.post_processor = processors.TemplateProcessing(single=parts, special_tokens=marks)


def _ends(raw: "RawTokenizer", named: Mapping[str, int]) -> tuple[int, ...]:
    special = raw.get_added_tokens_decoder()
    ends = [index for index, token in special.items() if token.special and token.content in _TURN_ENDS]
    return tuple(dict.fromkeys([*(named[name] for name in ("eos", "eot", "eom") if name in named), *ends]))


def _templates(metadata: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    """The chat template, and those under other names."""
    start = "tokenizer.chat_template"
    named = {key.removeprefix(f"{start}."): str(text) for key, text in metadata.items() if key.startswith(f"{start}.")}
    default: object = metadata.get(start)
    return (None if default is None else str(default)), named


def _list(metadata: Mapping[str, Any], name: str, path: Path) -> list[Any]:
    value: object = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(value, list):
        raise ValueError(f"{path} is corrupted: tokenizer.ggml.{name} is not a list")
    return cast(list[Any], value)
