"""A chat over several turns."""

import dataclasses
from pathlib import Path

import pytest
import torch

from calotype.language.conversation import Conversation
from calotype.language.model import LanguageModel
from calotype.language.text import TextModel
from calotype.language.tokenizer import load_tokenizer, text_tokenizer_of

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


@pytest.fixture
def model(language_model: LanguageModel, tokenizer_path: Path) -> TextModel:
    language_model.config = dataclasses.replace(language_model.config, context_length=300)
    tokenizer = text_tokenizer_of(load_tokenizer(tokenizer_path))
    return TextModel(
        language_model=language_model, tokenizer=dataclasses.replace(tokenizer, chat_template=TEMPLATE), name="tiny"
    )


def counted(model: TextModel) -> list[int]:
    """The number of tokens of every pass from now on."""
    counts: list[int] = []
    model.language_model.embedding.register_forward_hook(lambda _, inputs, __: counts.append(inputs[0].shape[1]))
    return counts


def test_each_answer_is_that_to_all_messages(model: TextModel) -> None:
    talk = Conversation(model, system="be short")
    for text in ("a fox", "two cats"):
        expected = model.generate([*talk.messages, {"role": "user", "content": text}], max_tokens=6)
        assert "".join(piece.text for piece in talk.say(text, max_tokens=6)) == expected.text
        assert talk.last is not None and talk.last.token_ids == expected.token_ids
    roles = [message["role"] for message in talk.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


def test_what_was_read_is_not_read_again(model: TextModel) -> None:
    talk = Conversation(model)
    list(talk.say("a fox", max_tokens=1))
    read = len(talk._read)
    counts = counted(model)
    list(talk.say("cat", max_tokens=1))
    assert talk.last is not None
    # the answer may be tokenised anew otherwise than it was chosen: then the whole is read again
    assert counts[0] in (talk.last.timings.num_prompt_tokens - read, talk.last.timings.num_prompt_tokens)


def test_only_the_new_part_is_read_where_the_past_stays(model: TextModel) -> None:
    with torch.no_grad():  # the only token it says: one that is tokenised as it was chosen
        fox = model.tokenizer.encode(" fox", add_special_tokens=False)[-1]
        model.language_model.head = torch.nn.Linear(model.language_model.config.width, 1024, bias=True)
        model.language_model.head.weight.zero_()
        model.language_model.head.bias.zero_()[fox] = 9.0
    talk = Conversation(model)
    list(talk.say("a fox", max_tokens=2))
    read = len(talk._read)
    counts = counted(model)
    list(talk.say("cat", max_tokens=2))
    assert talk.last is not None and counts[0] == talk.last.timings.num_prompt_tokens - read


def test_an_answer_that_is_broken_off_is_forgotten(model: TextModel) -> None:
    talk = Conversation(model)
    pieces = talk.say("a fox", max_tokens=8)
    next(pieces)
    next(pieces)
    pieces.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert talk.messages == [] and talk.last is None
    expected = model.generate([{"role": "user", "content": "two cats"}], max_tokens=5)
    assert "".join(piece.text for piece in talk.say("two cats", max_tokens=5)) == expected.text


def test_a_new_turn_breaks_off_the_last(model: TextModel) -> None:
    talk = Conversation(model)
    pieces = talk.say("a fox by the sea", max_tokens=8)
    next(pieces)
    next(pieces)
    expected = model.generate([{"role": "user", "content": "two cats"}], max_tokens=5)
    assert "".join(piece.text for piece in talk.say("two cats", max_tokens=5)) == expected.text
    assert list(pieces) == [] and len(talk.messages) == 2
    expected = model.generate([*talk.messages, {"role": "user", "content": "a fox"}], max_tokens=5)
    assert "".join(piece.text for piece in talk.say("a fox", max_tokens=5)) == expected.text


def test_mistakes_are_refused_at_once(model: TextModel) -> None:
    talk = Conversation(model)
    with pytest.raises(ValueError, match="temperature is -1"):
        talk.say("a fox", temperature=-1)
    with pytest.raises(ValueError, match="at most 299 leave room in the context of 300"):
        talk.say("fox " * 400)
    assert talk.messages == []
