"""Text that comes token by token: the same as all at once, never a part of a character, never a stop string."""

import random
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from calotype.language.detokenise import Detokeniser, StopMatcher
from calotype.language.tokenizer import TextTokenizer

SPECIAL = [AddedToken("<s>", special=True), AddedToken("</s>", special=True), AddedToken("<tool call>")]
TEXT = "Two foxes, naïve 狐 🦊🏽 e\u0301.\n  end"


def _raw(pieces: list[str], decoder: "decoders.Decoder | None") -> TextTokenizer:
    raw = Tokenizer(models.WordLevel({piece: place for place, piece in enumerate(pieces)}, "?"))
    raw.decoder = decoder  # pyright: ignore[reportAttributeAccessIssue]
    raw.add_tokens(SPECIAL)
    return TextTokenizer(raw=raw)


def _byte_level(*, strip: bool = False) -> TextTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġthe", "fox", "ĠçĭĲ", "ðŁ", "¦Ĭ", "é狐", "?"]  # one of them is no byte-level token
    decoder = decoders.ByteLevel()
    return _raw([*alphabet, *words], decoders.Sequence([decoder, decoders.Strip(" ", 1, 0)]) if strip else decoder)


def _sentence_piece(*parts: "decoders.Decoder") -> TextTokenizer:
    return _raw(
        [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁fox", "▁the", "en", "狐", "?", "<0xZZ>"],
        _of([*parts]),
    )


def _of(parts: "list[decoders.Decoder]") -> "decoders.Decoder":
    return decoders.Sequence(parts) if len(parts) > 1 else parts[0]


SPACES, BYTES, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
KINDS: dict[str, Callable[[], TextTokenizer]] = {
    "gpt2": _byte_level,
    "plate": lambda: _byte_level(strip=True),
    "llama": lambda: _sentence_piece(SPACES, BYTES, FUSE, decoders.Strip(" ", 1, 0)),
    "gemma": lambda: _sentence_piece(SPACES, BYTES, FUSE),
    "unigram": lambda: _sentence_piece(decoders.Metaspace()),
    "unigram, no prefix": lambda: _sentence_piece(decoders.Metaspace(prepend_scheme="never")),
    "word pieces": lambda: _raw(["the", "##fox", "fox", "##狐", "?"], decoders.WordPiece(cleanup=False)),
    "words": lambda: _raw(["the", "fox", "狐", "?"], None),
    "by pattern": lambda: _sentence_piece(decoders.Replace(Regex("[▁]"), " "), FUSE),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_the_whole_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    generator = random.Random(kind)
    held = 0
    for _ in range(120):
        count = generator.randrange(1, 40)
        # with an id that is in no vocabulary
        ids = [generator.randrange(tokenizer.vocab_size + 1) for _ in range(count)]
        stream = Detokeniser(tokenizer)
        pieces = [stream.add(token) for token in ids]
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)
        held += pieces.count("")
    assert held  # special tokens at least


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma"])
def test_a_character_comes_whole(kind: str) -> None:
    tokenizer = KINDS[kind]()
    raw = tokenizer.raw
    names = (
        [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(c)[0][0] for c in TEXT]
        if kind == "gpt2"
        else [f"<0x{byte:02X}>" for byte in TEXT.encode()]
    )
    names = list("".join(names)) if kind == "gpt2" else names
    stream, pieces = Detokeniser(tokenizer), list[str]()
    for name in names:
        token = raw.token_to_id(name)
        assert token is not None
        pieces.append(stream.add(token))
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "".join(pieces) + stream.finish() == TEXT
    if kind == "gpt2":
        assert [piece for piece in pieces if piece] == list(TEXT)


@pytest.mark.parametrize("kind", ["gpt2", "plate", "llama", "gemma", "unigram"])
def test_it_continues_a_prompt(kind: str) -> None:
    tokenizer = KINDS[kind]()
    generator = random.Random(kind)
    for _ in range(40):
        ids = [generator.randrange(tokenizer.vocab_size) for _ in range(12)]
        whole, first = Detokeniser(tokenizer), list[str]()
        first = [whole.add(token) for token in ids[:5]]
        stream = Detokeniser(tokenizer, after=ids[:5])
        rest = "".join(stream.add(token) for token in ids[5:]) + stream.finish()
        assert "".join(first) + rest == tokenizer.decode(ids)


def test_the_space_of_a_first_word() -> None:
    tokenizer = KINDS["llama"]()
    fox, the = (tokenizer.raw.token_to_id(name) for name in ("▁fox", "▁the"))
    assert fox is not None and the is not None
    assert Detokeniser(tokenizer).add(fox) == "fox"
    assert Detokeniser(tokenizer, after=[the]).add(fox) == " fox"


def _through(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.add(piece)
        assert not any(stop in shown for stop in stops)
    return shown + matcher.finish(), matcher.matched


def _reference(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            stop = max(endings, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_stop_strings_are_never_shown_however_the_text_is_cut() -> None:
    generator = random.Random(0)
    found = 0
    for _ in range(1500):
        stops = ["".join(generator.choices("ab\n", k=generator.randrange(1, 5))) for _ in range(generator.randrange(4))]
        text = "".join(generator.choices("abc\n", k=25))
        pieces, rest = list[str](), text
        while rest:
            size = generator.randrange(6)
            pieces.append(rest[:size])
            rest = rest[size:]
        result = _through(stops, pieces)
        assert result == _reference(stops, text), (stops, pieces)
        found += result[1] is not None
    assert 300 < found < 1400


def test_only_a_possible_start_is_held_back() -> None:
    matcher = StopMatcher(["\n\nUser:", "END"])
    assert matcher.add("hello\n") == "hello"
    assert matcher.add("\nU") == ""
    assert matcher.add("nless E") == "\n\nUnless "
    assert matcher.add("ND and more") == ""
    assert (matcher.matched, matcher.add("x"), matcher.finish()) == ("END", "", "")
    assert StopMatcher([]).add("anything") == "anything"
