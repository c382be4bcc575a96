"""Text in, text out."""

import dataclasses
from itertools import pairwise

import pytest
import torch

from calotype.language.model import LanguageModel
from calotype.language.text import TextModel
from calotype.language.tokenizer import Tokenizer


@pytest.fixture
def text_model(language_model: LanguageModel, tokenizer: Tokenizer) -> TextModel:
    """Random weights with a real tokenizer."""
    return TextModel(language_model=language_model, tokenizer=tokenizer)


def _say(text_model: TextModel, tokens: list[int]) -> None:
    """Make the model say `tokens` one after the other: each one's state is the head row of the next."""
    model = text_model.language_model
    width = model.config.width
    with torch.no_grad():
        for block in model.blocks:
            block.attention.output.weight.zero_()
            block.mlp.down.weight.zero_()
        model.norm.weight.fill_(1)
        model.embedding.weight.normal_(std=1e-3)
        head = torch.nn.Linear(width, model.config.vocab_size, bias=False)
        head.weight.normal_(std=1e-3)
        for place, (this, following) in enumerate(pairwise(tokens)):
            model.embedding.weight[this] = 10 * torch.eye(width)[place]
            head.weight[following] = 10 * torch.eye(width)[place]
        model.head = head


def test_it_stops_at_the_end_mark(text_model: TextModel, tokenizer: Tokenizer) -> None:
    fox, tail = tokenizer.encode("fox"), tokenizer.encode("on grass, pink")
    _say(text_model, [*fox, *tail, tokenizer.special.eos])
    result = text_model.generate("A fox", max_tokens=20)
    assert result.text == " on grass, pink"
    assert result.token_ids == tuple(tail)
    assert (result.finish_reason, result.prompt) == ("stop", "A fox")
    assert text_model.complete("A fox ") == "A fox on grass, pink"
    assert result.timings.first_token_seconds > 0
    assert result.timings.tokens_per_second is not None
    assert result.timings.tokens_per_second > 0


def test_it_stops_at_the_limit(text_model: TextModel, tokenizer: Tokenizer) -> None:
    _say(text_model, [*tokenizer.encode("fox on grass"), tokenizer.special.eos])
    result = text_model.generate("fox", max_tokens=1)
    assert (result.text, result.finish_reason) == (" on", "length")
    assert result.timings.tokens_per_second is None


def test_an_expansion_begins_anew(text_model: TextModel, tokenizer: Tokenizer) -> None:
    expand, eos = tokenizer.special.expand, tokenizer.special.eos
    assert expand is not None
    _say(text_model, [expand, *tokenizer.encode("a big fox"), eos])
    assert text_model.expand("fox").text == "a big fox"


def test_pieces_join_to_the_text(text_model: TextModel) -> None:
    pieces = list(text_model.stream("a fox", max_tokens=30, temperature=1.0, seed=4))
    result = text_model.generate("a fox", max_tokens=30, temperature=1.0, seed=4)
    assert "".join(piece.text for piece in pieces) == result.text
    assert [piece.token_id for piece in pieces][: len(result.token_ids)] == list(result.token_ids)


def test_a_character_of_several_tokens_comes_whole(text_model: TextModel, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("fox 狐")
    assert len(tokens) > 3
    _say(text_model, [*tokens, tokenizer.special.eos])
    pieces = [piece.text for piece in text_model.stream("fox")]
    assert "".join(pieces) == " 狐"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_marks_are_never_said(text_model: TextModel, tokenizer: Tokenizer) -> None:
    special = tokenizer.special
    assert special.expand is not None
    _say(text_model, [*tokenizer.encode("fox"), special.expand])
    assert special.expand not in text_model.generate("fox", max_tokens=3).token_ids


def test_mistakes_are_refused_at_once(text_model: TextModel) -> None:
    with pytest.raises(
        ValueError, match="the prompt has 61 tokens with its marks; at most 39 leave room in the context of 40"
    ):
        text_model.stream("fox " * 60)
    with pytest.raises(ValueError, match="temperature is -1"):
        text_model.stream("fox", temperature=-1)
    plain = dataclasses.replace(
        text_model.tokenizer, special=dataclasses.replace(text_model.tokenizer.special, expand=None)
    )
    with pytest.raises(ValueError, match="has no <expand> token"):
        dataclasses.replace(text_model, tokenizer=plain).expand("fox")
