"""Prompt weights: the syntax, and what they do to states."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from parity import error
from tiny_text_encoders import LONG, clip_model, clip_tokenizer, t5_model, t5_tokenizer

from calotype.core.copies import moved
from calotype.encoders.clip import ClipEncoder
from calotype.encoders.t5 import T5Encoder
from calotype.encoders.weighting import WeightedEncoder, parse_weights


@pytest.fixture(scope="module")
def clip() -> ClipEncoder:
    model = clip_model(projection=False)
    return ClipEncoder(model=model, tokenizer=clip_tokenizer(), layer=2, normed=False, pooled="pooler")


@pytest.fixture(scope="module")
def t5() -> T5Encoder:
    return T5Encoder(model=t5_model(), tokenizer=t5_tokenizer(), max_tokens=12, pad_to_max=True, masked=False)


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("a fox", [("a fox", 1)]),
        ("a (red:1.3) fox", [("a ", 1), ("red", 1.3), (" fox", 1)]),
        ("(a fox)", [("a fox", 1.1)]),
        ("((a) fox: .5 )b", [("a", 0.55), (" fox", 0.5), ("b", 1)]),
        ("(a:-1)(b:2.)", [("a", -1), ("b", 2)]),
        ("at 7:30 (12:30:1.5)", [("at 7:30 ", 1), ("12:30", 1.5)]),
        (r"a \(fox\) (\(b:2\):0)", [("a (fox) ", 1), ("(b:2)", 0)]),
        ("smile :) (a) :(", [("smile :) ", 1), ("a", 1.1), (" :(", 1)]),
        ("(:2)() \\", [(" \\", 1)]),
        ("(a:b)", [("a:b", 1.1)]),
        ("", []),
    ],
)
def test_syntax(prompt: str, parts: list[tuple[str, float]]) -> None:
    found = parse_weights(prompt)
    assert found.text == "".join(text for text, _ in parts)
    expected = [weight for text, weight in parts for _ in text]
    assert len(found.weights) == len(expected)
    assert all(math.isclose(a, b) for a, b in zip(found.weights, expected, strict=True))


def test_a_weight_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="weight inf in the prompt is too large"):
        parse_weights(f"(a:{'9' * 400})")
    with pytest.raises(ValueError, match=r"weight 2.46993e[+]41 in the prompt is too large"):
        parse_weights(f"{'(' * 1000}a{')' * 1000}")


def test_an_encoder_that_does_not_know_its_tokens_places_is_refused(clip: ClipEncoder) -> None:
    unplaced: Any = clip.__call__
    with pytest.raises(ValueError, match=r"^encoder is of type method, .* a ClipEncoder or a T5Encoder$"):
        WeightedEncoder(encoder=unplaced)


@pytest.mark.parametrize("kind", ["clip", "t5"])
def test_states_move_away_from_the_empty_prompts(clip: ClipEncoder, t5: T5Encoder, kind: str) -> None:
    encoder = {"clip": clip, "t5": t5}[kind]
    first = {"clip": 1, "t5": 0}[kind]  # CLIP has a begin mark
    plain, empty = encoder(["two dogs", "a red fox, old boat"]), encoder([""])
    found = WeightedEncoder(encoder=encoder)(["two dogs", "a (red fox:1.5), (old:0) boat"])
    assert torch.equal(found.lengths, plain.lengths) and torch.equal(found.states[0], plain.states[0])
    weights = torch.ones(plain.states.shape[1])
    weights[first + 1], weights[first + 2], weights[first + (4 if kind == "clip" else 5)] = 1.5, 1.5, 0
    if kind == "t5":
        assert t5_tokenizer().tokenize("a red fox, old boat")[2:6] == ["▁fox", ",", "▁old", "▁boat"]
        weights[5], weights[4] = 1, 0
    z, z0 = plain.states[1], empty.states[0]
    assert error(found.states[1, None], (z0 + weights[:, None] * (z - z0))[None]) <= 1e-5
    if plain.pooled is not None:
        assert found.pooled is not None and torch.equal(found.pooled, plain.pooled)


def test_weight_one_is_the_encoders_own(clip: ClipEncoder, t5: T5Encoder) -> None:
    for encoder in (clip, t5):
        found = WeightedEncoder(encoder=encoder)(["a (red:1.0) fox", r"a \(boat\)"])
        assert torch.equal(found.states, encoder(["a red fox", "a (boat)"]).states)


def test_every_chunk_is_weighted(clip: ClipEncoder) -> None:
    encoder = dataclasses.replace(clip, long_prompts="chunks")
    words = LONG.split()
    prompt = " ".join([*words[:80], f"({words[80]}:1.4)", *words[81:]])
    plain, found = encoder(["cat", LONG]).states, WeightedEncoder(encoder=encoder)(["cat", prompt]).states
    place = 77 + 1 + 80 - 75
    empty = encoder([""]).states[0, place - 77]
    assert error(found[1, None, place], empty + 1.4 * (plain[1, None, place] - empty)) <= 1e-5
    same = [i for i in range(154) if i != place]
    assert torch.equal(found[1, same], plain[1, same]) and torch.equal(found[0], plain[0])


def test_rows_of_their_own_length(t5: T5Encoder) -> None:
    """Past the end mark of an empty prompt there is nothing to move away from: states are scaled."""
    encoder = dataclasses.replace(t5, pad_to_max=False, masked=True)
    plain, found = encoder(["a cat"]).states, WeightedEncoder(encoder=encoder)(["a (cat:2)"]).states
    assert plain.shape == (1, 3, 32)
    assert error(found[:, 1], 2 * plain[:, 1]) <= 1e-5
    assert torch.equal(found[:, 2], plain[:, 2])
    single = WeightedEncoder(encoder=encoder)(["a (cat:2)", "two dogs on the (boat:2)"])
    assert error(single.states[:1, :3], found) <= 1e-5


def test_bad_prompts_are_refused(clip: ClipEncoder) -> None:
    for prompts in ([], "a (fox:2)", [3]):
        bad: Any = prompts
        with pytest.raises(ValueError, match="prompt"):
            WeightedEncoder(encoder=clip)(bad)


def test_a_copy_in_another_dtype(clip: ClipEncoder) -> None:
    copy = moved(WeightedEncoder(encoder=clip), torch.device("cpu"), torch.bfloat16)
    assert copy(["a (fox:1.2)"]).states.dtype is torch.bfloat16
    assert clip.model.dtype is torch.float32
