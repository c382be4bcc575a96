"""Output that must match: random logits, and texts that are valid nevertheless."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from calotype.language.constraint import json_constraint, regex_constraint
from calotype.language.sampling import Chooser, Sampling
from calotype.language.tokenizer import TextTokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["fox", "hen", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "at": {"$ref": "#/$defs/point"},
    },
    "required": ["name", "age", "kind", "at"],
    "additionalProperties": False,
    "$defs": {
        "point": {"type": "array", "prefixItems": [{"type": "null"}, {"const": 7}], "items": False, "minItems": 2}
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    raw.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<eos>", "<end>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [
        '{"name": "a fox", "age": 12, "kind": null, "tags": [true, false], "at": [null, 7]}',
        "naïve 狐 🦊 2024-05",
    ]
    raw.train_from_iterator(texts * 4, trainer)
    return TextTokenizer(raw=raw, eos=(0, 1))


def _random_text(tokenizer: TextTokenizer, sampling: Sampling, extra_rows: int = 0) -> str:
    chooser = Chooser(sampling, [], sampling.constraint(tokenizer))
    random = torch.Generator().manual_seed(sampling.seed)
    ids: list[int] = []
    for _ in range(600):
        token = chooser.choose(2 * torch.randn(tokenizer.vocab_size + extra_rows, generator=random)).token_id
        if token in tokenizer.eos:
            break
        ids.append(token)
    assert chooser.is_finished
    return tokenizer.decode(ids)


def _check(value: Any) -> None:
    assert isinstance(value, dict)
    entries: Mapping[str, Any] = value
    assert {"name", "age", "kind", "at"} <= set(entries) <= {*SCHEMA["properties"]}
    assert isinstance(entries["name"], str) and len(entries["name"]) <= 8
    assert type(entries["age"]) is int and 0 <= entries["age"] <= 120
    assert entries["kind"] in ("fox", "hen", None) and entries["at"] == [None, 7]
    tags = entries.get("tags", [])
    assert len(tags) <= 3 and all(type(tag) is bool for tag in tags)


def test_random_logits_give_valid_json(tokenizer: TextTokenizer) -> None:
    for seed in range(12):
        for schema in (SCHEMA, json.dumps(SCHEMA)):
            _check(json.loads(_random_text(tokenizer, Sampling(json_schema=schema, temperature=1.0, seed=seed))))


@pytest.mark.parametrize("pattern", [r"[0-9]{4}-(0[1-9]|1[0-2])", "(fox|hen) é{1,3}", "[狐🦊]{2,5}", "a|ab|abc"])
def test_random_logits_give_texts_that_match(tokenizer: TextTokenizer, pattern: str) -> None:
    for seed in range(6):
        text = _random_text(tokenizer, Sampling(regex=pattern, seed=seed), extra_rows=13)
        assert re.fullmatch(pattern, text), text


def test_a_constraint_follows_the_text(tokenizer: TextTokenizer) -> None:
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    constraint = regex_constraint("ab?", tokenizer)
    assert constraint.mask().nonzero().flatten().tolist() == [a]
    assert not constraint.is_complete
    constraint.accept(a)
    assert constraint.is_complete and not constraint.is_finished
    assert set(constraint.mask().nonzero().flatten().tolist()) == {0, 1, b}
    constraint.accept(b)
    assert constraint.is_finished
    assert constraint.mask().nonzero().flatten().tolist() == [0, 1]
    constraint.accept(1)
    assert constraint.is_finished


def test_a_token_that_may_not_come_is_refused(tokenizer: TextTokenizer) -> None:
    constraint = regex_constraint("ab?", tokenizer)
    with pytest.raises(ValueError, match="token 0 may not come here"):
        constraint.accept(0)


def test_no_constraint_is_none(tokenizer: TextTokenizer) -> None:
    assert Sampling().constraint(tokenizer) is None
    assert not Chooser(Sampling(), []).is_finished


def test_schemas_that_cannot_be_enforced_are_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(ValueError, match='Unimplemented keys: \\["uniqueItems"\\]'):
        json_constraint({"type": "array", "uniqueItems": True}, tokenizer)
    with pytest.raises(ValueError, match=r"json_schema is .* it must be JSON data"):
        json_constraint({"type": object()}, tokenizer)
    with pytest.raises(ValueError, match="look-around"):
        regex_constraint("a(?=b)", tokenizer)


def test_tokenizers_that_cannot_be_used_are_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(ValueError, match="names no end token"):
        regex_constraint("a", TextTokenizer(raw=tokenizer.raw))
    raw = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0)], 0))
    with pytest.raises(ValueError, match="constrained output does not work with this tokenizer"):
        regex_constraint("a", TextTokenizer(raw=raw, eos=(0,)))
