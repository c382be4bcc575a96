"""A language model as a text encoder."""

import pytest
import torch

from calotype.encoders.language import LanguageModelEncoder
from calotype.language.model import LanguageModel
from calotype.language.tokenizer import Tokenizer


@pytest.fixture
def encoder(language_model: LanguageModel, tokenizer: Tokenizer) -> LanguageModelEncoder:
    """Read after its second of three layers, at most ten tokens."""
    return LanguageModelEncoder(
        language_model=language_model, tokenizer=tokenizer, layer=2, normed=False, max_tokens=10
    )


def test_a_row_is_that_prompt_alone(encoder: LanguageModelEncoder) -> None:
    prompts = ["a fox", "", "a fox on the grass and cats"]
    together = encoder(prompts)
    assert together.lengths.tolist() == [4, 2, 9]
    assert together.states.shape == (3, 9, 24)
    assert together.warnings == ()
    for row, prompt in enumerate(prompts):
        alone, length = encoder([prompt]), int(together.lengths[row])
        assert alone.states.shape[1] == length
        assert (together.states[row, :length] - alone.states[0]).norm() <= 1e-5 * alone.states.norm()
        assert not together.states[row, length:].any()


@pytest.mark.parametrize("normed", [False, True])
def test_states_are_the_models(encoder: LanguageModelEncoder, normed: bool) -> None:
    special, model = encoder.tokenizer.special, encoder.language_model
    ids = torch.tensor([[special.bos, *encoder.tokenizer.encode("a cat"), special.eos]])
    lengths = torch.tensor([ids.shape[1]])
    read = LanguageModelEncoder(
        language_model=model, tokenizer=encoder.tokenizer, layer=1, normed=normed, max_tokens=10
    )
    states = read(["a cat"]).states
    with torch.no_grad():
        assert torch.equal(states, model.hidden_states(ids, lengths, layer=1, normed=normed))
    assert not states.requires_grad


def test_an_empty_prompt_is_its_marks(encoder: LanguageModelEncoder) -> None:
    special = encoder.tokenizer.special
    assert encoder.tokens([""]) == ([[special.bos, special.eos]], ())


def test_what_does_not_fit_is_named(encoder: LanguageModelEncoder) -> None:
    encoded = encoder(["a fox on the grass and a cat and two dogs", "a fox"])
    assert encoded.lengths.tolist() == [10, 4]
    assert len(encoded.warnings) == 1
    assert "has 11 tokens and the model reads 8; left out: 'and two dogs'" in encoded.warnings[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 4, "max_tokens": 10}, "layer is 4; the language model has layers 0 to 3"),
        ({"layer": 1, "max_tokens": 2}, "max_tokens is 2; it must be from 3 to the context length, 40"),
        ({"layer": 1, "max_tokens": 41}, "max_tokens is 41"),
    ],
)
def test_bad_settings_are_refused(
    language_model: LanguageModel, tokenizer: Tokenizer, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LanguageModelEncoder(language_model=language_model, tokenizer=tokenizer, normed=False, **options)


def test_no_prompts_are_refused(encoder: LanguageModelEncoder) -> None:
    with pytest.raises(ValueError, match="no prompts to encode"):
        encoder([])
