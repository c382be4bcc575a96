"""Tokenizers of the kinds that models use, trained on a few lines, taken apart as GGUF files keep them, and rebuilt."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from calotype.language.gguf_tokenizer import gguf_tokenizer
from calotype.language.tokenizer import TextTokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog, isn't it? It's 12345 or 67,890 in 2024.",
    "def add(a, b):\n    return a + b  # a comment\n\n\nprint(add(1, 2))",
    "naïve café déjà vu — Übung; 日本語 テスト 🙂 🙃",
    "We'll see what they've done, I'm sure you'd agree. WE'LL SEE!",
    "   spaces    before  and\tafter\r\n",
]
TEXTS = [
    *LINES,
    "",
    " ",
    "hello  world",
    "x  12  345 a 6",
    "it'S DON'T",
    "🙂🙂 unseen: ξψω",
    "a\n\n \n b",
    "cafe\u0301",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_level(pre: str) -> Tokenizer:
    """A tokenizer as the models of this kind publish it."""
    raw = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps: dict[str, list[Any]] = {
        "gpt-2": [plain],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), plain],
        "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated"), cut],
        "qwen2": [pre_tokenizers.Split(Regex(QWEN2), behavior="isolated"), cut],
    }
    raw.pre_tokenizer = pre_tokenizers.Sequence(steps[pre])
    raw.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        raw.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(LINES * 3, trainer)
    raw.add_tokens([AddedToken("<think>", normalized=False)])
    return raw


def taken_apart(raw: Tokenizer, pre: str) -> dict[str, Any]:
    """The metadata of a file with this tokenizer."""
    model = json.loads(raw.to_str())["model"]
    vocab = raw.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    kinds = {"<|end|>": 3, "<|start|>": 3, "<think>": 4}
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<|start|>"],
        "tokenizer.ggml.eos_token_id": vocab["<|end|>"],
        "tokenizer.ggml.padding_token_id": vocab["<|end|>"],
        "tokenizer.ggml.add_bos_token": False,
    }


def load(metadata: dict[str, Any]) -> TextTokenizer:
    return gguf_tokenizer(metadata, Path("m.gguf"))


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_tokenizers_give_the_ids_of_the_published_ones(pre: str) -> None:
    raw = byte_level(pre)
    rebuilt = load(taken_apart(raw, pre))
    for text in [*TEXTS, "a<|end|>b <think> c<|start|>"]:
        ids = raw.encode(text).ids
        assert rebuilt.encode(text, parse_special=True) == ids, text
        assert rebuilt.decode(ids) == raw.decode(ids)
    assert rebuilt.vocab_size == raw.get_vocab_size()
    assert (rebuilt.bos, rebuilt.eos, rebuilt.pad) == (1, (0,), 0)
    assert rebuilt.special_ids == {0, 1}


def test_digits_stand_alone_in_smollm_also_after_spaces() -> None:
    """Where transformers' conversion of GGUF files departs from the published tokenizer."""
    smollm = load(taken_apart(byte_level("smollm"), "smollm"))
    assert [smollm.raw.id_to_token(n) for n in smollm.encode("x  12")][-2:] == ["1", "2"]


def test_marks_at_start_and_end() -> None:
    metadata = taken_apart(byte_level("gpt-2"), "gpt-2")
    assert load(metadata).encode("a")[0] != 1
    both = load(metadata | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    assert both.encode("a")[0] == 1 and both.encode("a")[-1] == 0 and len(both.encode("a")) == 3
    assert both.encode("a", add_special_tokens=False) == both.encode("a")[1:-1]
    silent = {name: value for name, value in metadata.items() if name != "tokenizer.ggml.add_bos_token"}
    assert load(silent).encode("a")[0] != 1
    assert load(silent | {"tokenizer.ggml.pre": "llama-bpe"}).encode("a")[0] == 1


def test_special_tokens_and_templates() -> None:
    metadata = taken_apart(byte_level("gpt-2"), "gpt-2")
    count = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["<｜User｜>", "<|im_end|>", "<extra>", "plain text"]
    metadata["tokenizer.ggml.token_type"] += [3, 3, 3, 1]
    metadata |= {
        "tokenizer.ggml.eot_token_id": count,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.tool_use": "tools",
    }
    tokenizer = load(metadata)
    assert tokenizer.encode("<｜User｜>a<|im_end|>", parse_special=True)[::2] == [count, count + 1]
    assert tokenizer.eos == (0, count, count + 1)
    assert tokenizer.chat_template == "{{ messages }}" and tokenizer.template_for(tools=True) == "tools"
    assert tokenizer.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    assert tokenizer.raw.id_to_token(count + 3) == "plainĠtext" and tokenizer.vocab_size == count + 4
    assert load({name: value for name, value in metadata.items() if "_token_id" not in name}).bos is None


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "lines.txt"
    path.write_text("\n".join(line.replace("\n", " ") for line in LINES * 5), encoding="utf-8")
    return path


def sentence_piece(corpus: Path, *, gemma: bool) -> sentencepiece.SentencePieceProcessor:
    prefix = corpus.with_name("gemma" if gemma else "llama")
    options: dict[str, Any] = {"user_defined_symbols": ["▁▁", "▁▁▁", "▁▁▁▁", "<table>"]} if gemma else {}
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        add_dummy_prefix=not gemma,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.99,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


def pieces(model: sentencepiece.SentencePieceProcessor, *, gemma: bool) -> dict[str, Any]:
    """The metadata of a file with this model."""
    count = range(model.get_piece_size())
    user = {"▁▁", "▁▁▁", "▁▁▁▁", "<table>"}
    tokens = [model.id_to_piece(n) for n in count]

    def kind(n: int) -> int:
        if model.is_unknown(n):
            return 2
        return 3 if model.is_control(n) else 6 if model.is_byte(n) else 4 if tokens[n] in user else 1

    return {
        "general.architecture": "gemma3" if gemma else "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [t.replace("▁", " ") if gemma and t in user else t for t in tokens],
        "tokenizer.ggml.scores": [model.get_score(n) for n in count],
        "tokenizer.ggml.token_type": [kind(n) for n in count],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_space_prefix": not gemma,
    }


@pytest.mark.parametrize("gemma", [False, True])
def test_sentence_piece_models_give_the_ids_of_the_library(corpus: Path, gemma: bool) -> None:
    model = sentence_piece(corpus, gemma=gemma)
    rebuilt = load(pieces(model, gemma=gemma))
    assert rebuilt.vocab_size == model.get_piece_size()
    assert (rebuilt.bos, rebuilt.eos) == (model.bos_id(), (model.eos_id(),))
    for text in TEXTS:
        if not text.strip() or (not gemma and text.startswith(" ")):
            continue  # SentencePiece adds its space also before another; transformers does not
        ids = model.encode(text)
        assert rebuilt.encode(text) == [model.bos_id(), *ids], text
        assert rebuilt.decode(ids) == text
    whole = "a<table>b" if gemma else "a</s>b"
    assert any(rebuilt.raw.id_to_token(n) in ("<table>", "</s>") for n in rebuilt.encode(whole, parse_special=True))


def test_sentence_piece_without_a_space_before_the_text(corpus: Path) -> None:
    metadata = pieces(sentence_piece(corpus, gemma=False), gemma=False) | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = load(metadata)
    first = tokenizer.raw.id_to_token(tokenizer.encode("the", add_special_tokens=False)[0])
    assert first is not None and not first.startswith("▁")
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"tokenizer.ggml.tokens": []}, "m.gguf has no tokenizer"),
        ({"tokenizer.ggml.tokens": 3}, "tokenizer.ggml.tokens is not a list"),
        ({"tokenizer.ggml.model": "bert"}, r"kind 'bert' is not known; known are gpt2 \(byte-level BPE\), llama"),
        ({"tokenizer.ggml.pre": "chatglm-bpe"}, "pre-tokenizer 'chatglm-bpe' is not known; known are .*smollm"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "a merge of its vocabulary is not of two tokens"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "its vocabulary makes no tokenizer"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000, of 401 tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "it has 1 kinds for 401 tokens"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": []}, "it has 0 scores for 401 tokens"),
    ],
)
def test_what_makes_no_tokenizer_is_refused(entries: dict[str, Any], match: str) -> None:
    metadata = taken_apart(byte_level("gpt-2"), "gpt-2")
    with pytest.raises(ValueError, match=match):
        load(metadata | entries)


def test_a_token_that_occurs_twice_is_named() -> None:
    metadata = taken_apart(byte_level("gpt-2"), "gpt-2")
    metadata["tokenizer.ggml.tokens"][5] = metadata["tokenizer.ggml.tokens"][9]
    with pytest.raises(ValueError, match="occurs twice in its vocabulary"):
        load(metadata)
