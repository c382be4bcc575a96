"""Text in, text out."""

import dataclasses
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch

from calotype.core.moe import ExpertsConfig
from calotype.encoders.language import LanguageModelEncoder
from calotype.language.model import LanguageModel, LanguageModelConfig
from calotype.language.text import TextModel
from calotype.language.tokenizer import Tokenizer
from calotype.pipelines.plate import text_model_of

CHATML = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% if enable_thinking %}<think>{% endif %}{% endif %}"
)


@pytest.fixture
def text_model(language_model: LanguageModel, tokenizer: Tokenizer) -> TextModel:
    """Random weights with a real tokenizer."""
    encoder = LanguageModelEncoder(
        language_model=language_model, tokenizer=tokenizer, layer=1, normed=False, max_tokens=32
    )
    return text_model_of(encoder)


@pytest.fixture
def chat_model(text_model: TextModel) -> TextModel:
    """The same with a chat template and a longer context."""
    model = text_model.language_model
    model.config = dataclasses.replace(model.config, context_length=400)
    return dataclasses.replace(
        text_model, tokenizer=dataclasses.replace(text_model.tokenizer, chat_template=CHATML), expand_token=None
    )


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
    with pytest.raises(ValueError, match="the prompt has 61 tokens; at most 39 leave room in the context of 40"):
        text_model.stream("fox " * 60)
    with pytest.raises(ValueError, match="temperature is -1"):
        text_model.stream("fox", temperature=-1)
    with pytest.raises(ValueError, match="plate has neither a token for expansion nor a chat template"):
        dataclasses.replace(text_model, expand_token=None).expand("fox")
    with pytest.raises(ValueError, match="logit_bias names token 5000; ids go from 0 to 1023"):
        text_model.generate("fox", logit_bias={5000: 1.0})
    with pytest.raises(ValueError, match="tools is for messages"):
        text_model.generate("fox", tools=[])
    with pytest.raises(ValueError, match="unknown option 'max_token'; did you mean 'max_tokens'"):
        text_model.generate("fox", max_token=3)  # pyright: ignore


@pytest.mark.parametrize("prompt", [None, 5, b"fox", {"role": "user", "content": "fox"}, iter(["fox"])])
def test_what_is_no_prompt_is_refused(chat_model: TextModel, prompt: Any) -> None:
    for call in (chat_model.generate, chat_model.stream):
        with pytest.raises(ValueError, match="it must be a text, a list of messages or a list of texts"):
            call(prompt)
    with pytest.raises(ValueError, match="it must be a string of whole characters"):
        chat_model.complete(prompt)


def test_several_prompts_are_what_each_is_alone(text_model: TextModel) -> None:
    prompts = ["a fox", "two cats at night", "a fox", "a red bee on a beach and a car"]
    together = text_model.generate(prompts, max_tokens=9, temperature=1.0, seed=3)
    alone = [text_model.generate(prompt, max_tokens=9, temperature=1.0, seed=3) for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        assert (one.text, one.token_ids, one.prompt) == (other.text, other.token_ids, other.prompt)
        assert one.finish_reason == other.finish_reason
        assert one.timings.num_prompt_tokens == other.timings.num_prompt_tokens
        assert one.timings.kv_cache_bytes > 0 < other.timings.kv_cache_bytes


def test_a_stop_string_ends_the_text_before_it(text_model: TextModel, tokenizer: Tokenizer) -> None:
    fox, tail = tokenizer.encode("fox"), tokenizer.encode("on grass, pink")
    _say(text_model, [*fox, *tail, tokenizer.special.eos])
    for prompt in ("fox", ["fox"]):
        found = text_model.generate(prompt, stop="ss, p", max_tokens=20)
        result = found if not isinstance(found, list) else found[0]
        assert (result.text, result.finish_reason) == (" on gra", "stop")
    assert "".join(p.text for p in text_model.stream("fox", stop=["grass", "zebra"], max_tokens=20)) == " on "


def test_log_probabilities(text_model: TextModel) -> None:
    result = text_model.generate("a fox", max_tokens=4, logprobs=2)
    assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
    for choice, token in zip(result.logprobs, result.token_ids, strict=True):
        assert choice.token_id == token == choice.top_logprobs[0][0]
        assert choice.logprob == choice.top_logprobs[0][1] < 0
    assert text_model.generate("a fox", max_tokens=4).logprobs is None


def test_cancelling_gives_what_came(text_model: TextModel) -> None:
    cancel = threading.Event()
    cancel.set()
    alone = text_model.generate("a fox", max_tokens=9, cancel=cancel)
    assert alone.finish_reason == "cancelled" and len(alone.token_ids) == 1
    together = text_model.generate(["a fox", "a cat"], max_tokens=9, cancel=cancel)
    assert [(each.finish_reason, each.token_ids, each.text) for each in together] == [("cancelled", (), "")] * 2
    assert together[0].timings.tokens_per_second is None


def test_messages_go_through_the_chat_template(chat_model: TextModel) -> None:
    messages = [{"role": "user", "content": "a <bos> fox"}]
    prompt = chat_model.chat_prompt(messages)
    assert prompt == "[user] a <bos> fox\n[assistant] "
    result = chat_model.generate(messages, max_tokens=5)
    ids = chat_model.tokenizer.encode(prompt, add_special_tokens=False, parse_special=True)
    assert result.prompt == prompt and result.timings.num_prompt_tokens == len(ids)
    assert "".join(piece.text for piece in chat_model.stream(messages, max_tokens=5)) == result.text


def test_reasoning_stands_apart(chat_model: TextModel) -> None:
    messages = [{"role": "user", "content": "fox"}]
    result = chat_model.generate(messages, max_tokens=5, enable_thinking=True)
    assert result.text == "" and result.reasoning is not None


def test_a_chat_model_expands_by_its_template(chat_model: TextModel) -> None:
    result = chat_model.expand("fox", max_tokens=6)
    assert result.prompt.startswith("[system] You write prompts") and "[user] fox\n" in result.prompt
    assert len(result.token_ids) <= 6


def test_logits_and_embeddings(text_model: TextModel) -> None:
    ids = torch.tensor([[1, 5, 9], [1, 6, 2]])
    logits = text_model.logits(ids)
    assert logits.shape == (2, 3, 1024) and logits.dtype is torch.float32
    assert torch.equal(logits, text_model.logits([[1, 5, 9], [1, 6, 2]]))
    vectors = text_model.embed(["a fox", "two cats at night"])
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(2))
    assert torch.allclose(vectors[:1], text_model.embed("a fox"), atol=1e-6)
    encoded = torch.tensor([text_model.tokenizer.encode("a fox")])
    states = text_model.language_model.hidden_states(encoded, torch.tensor([encoded.shape[1]]), layer=2, normed=False)
    for pooling, expected in (("mean", states[0].mean(0)), ("last", states[0, -1])):
        found = text_model.embed("a fox", layer=2, pooling=pooling, normalize=False)
        assert torch.allclose(found[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 2], [3]], r"the lengths \[1, 2\]"),
        ([[1, 1024]], "this model has 0 to 1023"),
        ([[-1]], "ids go from -1"),
        (torch.zeros(1, 2), "torch.float32; they must be"),
        ([[]], r"shape \[1, 0\]"),
        (5, "ids are 5; they must be rows of whole numbers"),
        ([1, 2], r"ids are \[1, 2\]; they must be rows"),
        ([[None]], "they must be rows of whole numbers"),
        ([[2**70]], "they must be rows of whole numbers"),
    ],
)
def test_wrong_ids(text_model: TextModel, ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text_model.logits(ids)


def test_wrong_texts_to_embed(text_model: TextModel) -> None:
    with pytest.raises(ValueError, match="pooling is 'max'"):
        text_model.embed("a", pooling="max")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="at least one text"):
        text_model.embed([])
    with pytest.raises(ValueError, match="the texts are 5; they must be a text or a list of texts"):
        text_model.embed(5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"layer is 1\.0; this model has layers 0 to"):
        text_model.embed("a", layer=1.0)  # pyright: ignore[reportArgumentType]


def test_experts_that_were_visited(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    config = LanguageModelConfig(
        vocab_size=1024,
        width=16,
        layers=2,
        heads=2,
        kv_heads=1,
        head_width=8,
        hidden=16,
        context_length=64,
        experts=ExpertsConfig(count=4, active=2, hidden=8),
    )
    encoder = LanguageModelEncoder(
        language_model=LanguageModel(config), tokenizer=tokenizer, layer=1, normed=False, max_tokens=32
    )
    result = text_model_of(encoder).generate("a fox", max_tokens=3)
    assert result.experts is not None and set(result.experts) == {0, 1}
    assert all(2 <= len(touched) <= 4 for touched in result.experts.values())
