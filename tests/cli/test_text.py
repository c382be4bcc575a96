"""`calotype text`."""

from pathlib import Path

from calotype.pipelines.load_text import load_language_model


def test_it_goes_on_from_the_prompt(run, model: Path):
    code, out, err = run("text", "a", "red", "--model", model, "--max-tokens", "3")
    expected = load_language_model(model).generate("a red", max_tokens=3)
    assert (code, "\n".join(out)) == (0, "a red" + expected.text)
    assert len(expected.token_ids) == 3
    assert err == ["calotype: warning: stopped after 3 tokens: the text may go on (--max-tokens)"]


def test_expand_prints_the_expansion_alone(run, model: Path):
    options = ("--max-tokens", "4", "--temperature", "1", "--seed", "5")
    code, out, _ = run("text", "fox", "--expand", "--model", model, *options)
    expected = load_language_model(model).expand("fox", max_tokens=4, temperature=1.0, seed=5)
    assert (code, "\n".join(out)) == (0, expected.text.strip())


def test_a_seed_without_temperature_is_remarked(run, model: Path):
    _, _, err = run("text", "fox", "--model", model, "--seed", "5", "--max-tokens", "1")
    assert "calotype: warning: --seed changes nothing at temperature 0: add --temperature 1" in err


def test_mistakes(fails, model: Path):
    assert "the prompt is empty" in fails("text", "", "--model", model)
    assert "temperature is -1.0" in fails("text", "a", "--model", model, "--temperature", "-1")
    assert "'0' is not a whole number from 1 up" in fails("text", "a", "--model", model, "--max-tokens", "0")
    assert "no folder or .gguf file 'gpt'" in fails("text", "a", "--model", "gpt")
    assert "the prompt has" in fails("text", "fox " * 100, "--model", model)
