"""Text to ids and back."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from calotype.language.tokenizer import Tokenizer, load_text_tokenizer, load_tokenizer, text_tokenizer_of
from calotype.plate.training.objects import object_names


@pytest.mark.parametrize("text", ["a fox on the grass", "two foxes, gray background", "naïve 狐 🦊 #1", "", "x"])
def test_lower_case_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_case_and_spaces_do_not_matter(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("  A  Fox\n on the\tGRASS ") == tokenizer.encode("a fox on the grass")


def test_every_word_for_an_object_is_one_or_two_tokens(tokenizer: Tokenizer) -> None:
    for entry in object_names():
        for word in " ".join((entry.name, entry.plural, *entry.synonyms)).split():
            assert len(tokenizer.encode(word)) <= 2, word


def test_marks_in_a_text_are_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a <eos> fox <expand> <pad>")
    special = tokenizer.special
    assert not {special.pad, special.bos, special.eos, special.expand} & set(ids)
    assert tokenizer.decode(ids) == "a <eos> fox <expand> <pad>"
    assert tokenizer.vocab_size == 1024
    assert (special.pad, special.bos, special.eos, special.expand) == (0, 1, 2, 3)


def test_marks_are_not_shown(tokenizer: Tokenizer) -> None:
    special = tokenizer.special
    assert tokenizer.decode([special.bos, *tokenizer.encode("a fox"), special.eos, special.pad]) == "a fox"


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no tokenizer file at"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("not json", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a tokenizer file"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_file_without_marks_is_refused(tmp_path: Path) -> None:
    RawTokenizer(BPE()).save(str(tmp_path / "plain.json"))
    with pytest.raises(ValueError, match="has no <pad> token"):
        load_tokenizer(tmp_path / "plain.json")


CORPUS = ["A fox on a beach, naïve 狐 🦊.", "Two foxes:\n  one & two", "<think> hmm </think>"] * 3


def _byte_level() -> RawTokenizer:
    raw = RawTokenizer(BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    raw.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|start|>", "<|end|>", "<|turn|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_tokens(["<think>"])
    return raw


def _with_start(raw: RawTokenizer, start: str = "<|start|>") -> RawTokenizer:
    token = raw.token_to_id(start)
    assert token is not None
    raw.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{start} $A", special_tokens=[(start, token)]
    )
    return raw


def _byte_fallback() -> RawTokenizer:
    """Like Llama 2's: pieces with a mark for spaces, bytes for the rest."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁aefnox,", "▁f", "ox", "▁fox"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    raw = RawTokenizer(BPE(vocab, [("▁", "f"), ("o", "x"), ("▁f", "ox")], unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    raw.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _with_start(raw, "<s>")


def _folder(folder: Path, raw: RawTokenizer | None, files: dict[str, object]) -> Path:
    if raw is not None:
        raw.save(str(folder / "tokenizer.json"))
    for name, entries in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(entries if isinstance(entries, str) else json.dumps(entries), encoding="utf-8")
    return folder


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
TEXTS = ["a fox, naïve 狐 🦊", " two  foxes\n", "", "<|turn|>user<|end|> <think>", "fox</s> an <s>"]


@pytest.mark.parametrize("kind", ["byte level", "with start", "byte fallback"])
def test_text_tokenizers_read_and_write_as_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    makers = {
        "byte level": _byte_level,
        "with start": lambda: _with_start(_byte_level()),
        "byte fallback": _byte_fallback,
    }
    marks = ("<s>", "</s>") if kind == "byte fallback" else ("<|start|>", "<|end|>")
    # where there is a tokenizer.json, its post-processor decides, whatever these two say
    settings = {**FAST, "bos_token": marks[0], "eos_token": marks[1], "add_bos_token": True, "add_eos_token": True}
    added = {"extra_special_tokens": ["<|new|>"], "pad_token": "<|pad|>"}
    folder = _folder(tmp_path, makers[kind](), {"tokenizer_config.json": {**settings, **added}})
    ours, theirs = load_text_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    assert (ours.bos, ours.eos, ours.pad) == (theirs.bos_token_id, (theirs.eos_token_id,), theirs.pad_token_id)
    assert ours.vocab_size == len(theirs)
    assert ours.template_tokens == theirs.special_tokens_map
    assert ours.special_ids >= set(theirs.all_special_ids)
    for text in [*TEXTS, "x<|new|>y<|pad|>"]:
        for marked in (True, False):
            expected = theirs(text, add_special_tokens=marked)["input_ids"]
            assert ours.encode(text, add_special_tokens=marked, parse_special=True) == expected
        ids = theirs(text)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
        plain = theirs(text, split_special_tokens=True)["input_ids"]
        assert ours.encode(text) == plain


def test_special_tokens_in_a_text_are_text_by_default(tmp_path: Path) -> None:
    settings = {"bos_token": "<|start|>", "eos_token": {"content": "<|end|>", "special": True}}
    tokenizer = load_text_tokenizer(_folder(tmp_path, _with_start(_byte_level()), {"tokenizer_config.json": settings}))
    start, end = tokenizer.bos, tokenizer.eos[0]
    assert start is not None
    assert tokenizer.encode("hi<|end|>", parse_special=True)[-1] == end
    ids = tokenizer.encode("hi<|end|>")
    assert ids[0] == start and end not in ids
    assert tokenizer.decode(ids) == "hi<|end|>"
    assert start not in tokenizer.encode("hi<|end|>", add_special_tokens=False)
    with pytest.raises(ValueError, match=r"the prompt is '\\ud800'; it must be a string of whole characters"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize(
    ("files", "bos", "eos", "pad"),
    [
        ({}, None, (), None),
        ({"generation_config.json": {"bos_token_id": 0, "eos_token_id": [2, 1], "pad_token_id": 2}}, 0, (2, 1), 2),
        ({"config.json": {"eos_token_id": 1}}, None, (1,), None),
        (
            {"tokenizer_config.json": {"eos_token": "<|turn|>"}, "generation_config.json": {"eos_token_id": [1, 2]}},
            None,
            (2, 1),
            None,
        ),
        (
            {"special_tokens_map.json": {"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>"}},
            0,
            (1,),
            None,
        ),
        (
            {"generation_config.json": {"eos_token_id": None}, "config.json": {"eos_token_id": 1}},
            None,
            (),
            None,
        ),
    ],
)
def test_marks_come_from_the_folders_files(
    files: dict[str, object], bos: int | None, eos: tuple[int, ...], pad: int | None, tmp_path: Path
) -> None:
    tokenizer = load_text_tokenizer(_folder(tmp_path, _byte_level(), files))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (bos, eos, pad)


def test_added_tokens_keep_their_ids(tmp_path: Path) -> None:
    raw = _byte_level()
    entry = {"content": "<|more|>", "special": True}
    settings = {
        "added_tokens_decoder": {str(raw.get_vocab_size()): entry, "1": {"content": "<|end|>", "special": True}}
    }
    tokenizer = load_text_tokenizer(_folder(tmp_path, raw, {"tokenizer_config.json": settings}))
    assert tokenizer.raw.token_to_id("<|more|>") == tokenizer.vocab_size - 1
    assert tokenizer.vocab_size - 1 in tokenizer.special_ids
    settings = {"added_tokens_decoder": {"9999": entry}}
    with pytest.raises(ValueError, match=r"token '<\|more\|>' is 9999 in tokenizer_config.json but 3\d\d in the vocab"):
        load_text_tokenizer(_folder(tmp_path, raw, {"tokenizer_config.json": settings}))


@pytest.mark.parametrize(
    ("file", "entries", "message"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder of tok"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": "a"}}, "added_tokens_decoder of tokenizer_config"),
        ("tokenizer_config.json", {"added_tokens_decoder": 5}, "added_tokens_decoder of tokenizer_config"),
        ("tokenizer_config.json", {"chat_template": [{"name": "x"}]}, "not a list of names and templates"),
        ("tokenizer_config.json", {"chat_template": [5]}, "not a list of names and templates"),
        ("generation_config.json", {"eos_token_id": "x"}, "the eos_token_id of .* is 'x'; it must be an id or ids"),
        ("generation_config.json", {"eos_token_id": [[1]]}, r"is \[\[1\]\]; it must be an id or ids"),
        ("generation_config.json", {"bos_token_id": {}}, "the bos_token_id of .* is {}; it must be an id or ids"),
        ("generation_config.json", "[" * 100_000, "is not JSON"),
    ],
)
def test_senseless_entries_are_refused(file: str, entries: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_text_tokenizer(_folder(tmp_path, _byte_level(), {file: entries}))


def test_entries_that_are_no_tokens_are_left_out(tmp_path: Path) -> None:
    settings = {"eos_token": {"content": 5}, "extra_special_tokens": 5, "additional_special_tokens": [{"content": 5}]}
    tokenizer = load_text_tokenizer(_folder(tmp_path, _byte_level(), {"tokenizer_config.json": settings}))
    assert tokenizer.eos == ()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8 text"):
        load_text_tokenizer(tmp_path)


def test_named_extra_tokens_reach_templates(tmp_path: Path) -> None:
    settings = {"extra_special_tokens": {"image_token": "<|image|>"}, "eos_token": "<|end|>", "add_bos_token": True}
    tokenizer = load_text_tokenizer(_folder(tmp_path, _byte_level(), {"tokenizer_config.json": settings}))
    assert tokenizer.template_tokens == {"image_token": "<|image|>", "eos_token": "<|end|>"}
    assert tokenizer.raw.token_to_id("<|image|>") in tokenizer.special_ids


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({"tokenizer_config.json": {"chat_template": "S"}}, "S", "S"),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "D", "T"),
        ({"tokenizer_config.json": {"chat_template": {"default": "D", "tool_use": "T"}}}, "D", "T"),
        ({"tokenizer_config.json": {"chat_template": "S"}, "chat_template.jinja": "F"}, "F", "F"),
        ({"chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "G"}, "F", "G"),
        ({"chat_template.json": {"chat_template": "P"}}, "P", "P"),
    ],
)
def test_chat_templates(files: dict[str, object], plain: str, with_tools: str, tmp_path: Path) -> None:
    tokenizer = load_text_tokenizer(_folder(tmp_path, _byte_level(), files))
    assert tokenizer.chat_template == plain
    assert (tokenizer.template_for(), tokenizer.template_for(tools=True)) == (plain, with_tools)
    assert tokenizer.template_for(name="default", tools=True) == plain
    with pytest.raises(ValueError, match="no chat template 'zzz'; there are"):
        tokenizer.template_for(name="zzz")


def test_no_chat_template_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no chat template: give a plain prompt"):
        load_text_tokenizer(_folder(tmp_path, _byte_level(), {})).template_for()
    files: dict[str, object] = {"tokenizer_config.json": {"chat_template": NAMED[2:]}}
    tokenizer = load_text_tokenizer(_folder(tmp_path, _byte_level(), files))
    with pytest.raises(ValueError, match=r"no chat template: only \['rag'\], by name"):
        tokenizer.template_for()
    assert tokenizer.template_for(name="rag") == "R"


def test_a_tokenizer_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    raw = _byte_level()
    raw.model.save(str(tmp_path))
    settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|start|>", "eos_token": "<|end|>"}
    tokenizer = load_text_tokenizer(_folder(tmp_path, None, {"tokenizer_config.json": settings}))
    assert not (tmp_path / "tokenizer.json").exists()
    assert tokenizer.encode("a fox, 狐") == raw.encode("a fox, 狐").ids
    assert tokenizer.eos == (raw.token_to_id("<|end|>"),)
    (tmp_path / "vocab.json").write_text("[]")
    with pytest.raises(ValueError, match="transformers cannot convert the tokenizer in"):
        load_text_tokenizer(tmp_path)


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder at"):
        load_text_tokenizer(tmp_path / "nowhere")
    with pytest.raises(
        FileNotFoundError, match=r"no tokenizer in .*; it needs tokenizer.json or one of tokenizer.model"
    ):
        load_text_tokenizer(tmp_path)
    _folder(tmp_path, _byte_level(), {"tokenizer_config.json": "{"})
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not JSON"):
        load_text_tokenizer(tmp_path)
    _folder(tmp_path, None, {"tokenizer_config.json": []})
    with pytest.raises(ValueError, match="does not hold named entries"):
        load_text_tokenizer(tmp_path)


def test_truncation_and_padding_of_a_file_are_left_out(tmp_path: Path) -> None:
    raw = _byte_level()
    raw.enable_truncation(3)
    raw.enable_padding(length=50)
    tokenizer = load_text_tokenizer(_folder(tmp_path, raw, {}))
    assert tokenizer.decode(tokenizer.encode("a fox on a beach")) == "a fox on a beach"


def test_the_bundled_tokenizer_as_any_other(tokenizer: Tokenizer) -> None:
    other = text_tokenizer_of(tokenizer)
    special = tokenizer.special
    assert (other.bos, other.eos, other.pad) == (special.bos, (special.eos,), special.pad)
    assert other.encode("a fox <eos>") == [special.bos, *tokenizer.encode("a fox <eos>")]
    assert special.eos in other.encode("a fox <eos>", parse_special=True)
    assert other.decode(other.encode("a fox")) == "a fox" == tokenizer.decode(tokenizer.encode("a fox"))
    assert other.template_tokens == {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
