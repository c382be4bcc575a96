"""`calotype chat`, and the options it shares with `calotype text`."""

import io
from pathlib import Path

import pytest
import torch

from calotype.language.conversation import Conversation
from calotype.pipelines.load_text import load_language_model


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch):
    """What stands on the standard input."""
    return lambda *lines: monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def answers(folder: Path, *texts: str) -> list[str]:
    talk = Conversation(load_language_model(folder), system="be short")
    return ["".join(piece.text for piece in talk.say(text, max_tokens=4)) for text in texts]


OPTIONS = ("--max-tokens", "4", "--temperature", "0", "--system", "be short")


def test_it_answers_line_by_line_and_remembers(run, say, llama_folder: Path):
    say("a fox", "", "two cats", "/quit", "never read")
    code, out, err = run("chat", "--model", llama_folder, *OPTIONS)
    assert (code, "\n".join(out)) == (0, "\n".join(answers(llama_folder, "a fox", "two cats")))
    assert err == []


def test_it_starts_again_and_tells_figures(run, say, llama_folder: Path):
    say("/stats", "a fox", "/new", "a fox", "/stats")
    code, out, err = run("chat", "--model", llama_folder, *OPTIONS)
    [answer] = answers(llama_folder, "a fox")
    assert (code, "\n".join(out)) == (0, f"{answer}\n{answer}")
    assert err[0] == "calotype: no answer yet"
    assert err[1].startswith("calotype: 4 tokens after ") and "MB of keys and values" in err[1]


def test_the_bundled_model_cannot_chat(fails, say):
    say("a fox")
    for command in (("chat",), ("text", "a fox", "--chat")):
        message = fails(*command)
        assert "the bundled language model completes and expands prompts, and was never trained to chat" in message
        assert "--model HuggingFaceTB/SmolLM2-135M-Instruct" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device here")
def test_a_device_that_is_not_there(fails, say, llama_folder: Path):
    say("a fox")
    for command in (("chat", "--model", llama_folder), ("text", "a"), ("image", "a")):
        message = fails(*command, "--device", "cuda")
        assert message.startswith("device is 'cuda', which cannot be used: ")
        assert message.endswith("; this machine has cpu")


def test_a_model_without_a_template_cannot_chat(fails, say, plate_folder: Path):
    say("a fox")
    assert "this tokenizer has no chat template" in fails("chat", "--model", plate_folder)


def test_text_answers_with_chat(run, fails, llama_folder: Path):
    code, out, _ = run("text", "a", "fox", "--chat", "--model", llama_folder, *OPTIONS)
    assert (code, "\n".join(out)) == (0, answers(llama_folder, "a fox")[0])
    assert "--system is for --chat" in fails("text", "a", "--model", llama_folder, "--system", "x")


def test_output_under_a_constraint(run, fails, tmp_path: Path, llama_folder: Path):
    code, out, err = run("text", "a", "--chat", "--model", llama_folder, "--regex", "(yes|no)")
    assert code == 0 and out in (["yes"], ["no"]) and err == []
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [12, 34]}')
    _, out, _ = run("text", "a", "--chat", "--model", llama_folder, "--json-schema", schema)
    assert out in (["12"], ["34"])
    schema.write_text("{")
    assert "is not JSON" in fails("text", "a", "--model", llama_folder, "--json-schema", schema)
    schema.write_text("null")
    assert "schema.json holds no JSON object" in fails("text", "a", "--model", llama_folder, "--json-schema", schema)
    schema.write_bytes(b"\xff")
    assert "schema.json is not JSON" in fails("text", "a", "--model", llama_folder, "--json-schema", schema)
    assert "Is a directory" in fails("text", "a", "--model", llama_folder, "--json-schema", tmp_path)
    assert "regex" in fails("text", "a", "--model", llama_folder, "--regex", "(")
    assert "top_p is 0.0" in fails("text", "a", "--model", llama_folder, "--top-p", "0")


def test_an_input_that_is_closed_or_no_text(run, fails, monkeypatch: pytest.MonkeyPatch, llama_folder: Path):
    monkeypatch.setattr("sys.stdin", None)
    assert run("chat", "--model", llama_folder, *OPTIONS) == (0, [], [])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert "the input is not valid text" in fails("chat", "--model", llama_folder, *OPTIONS)


def test_packed_weights(run, llama_folder: Path):
    code, out, _ = run("text", "a", "fox", "--model", llama_folder, "--packed", "int8", "--max-tokens", "2")
    assert code == 0 and out[0].startswith("a fox")
