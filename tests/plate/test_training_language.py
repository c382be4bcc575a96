"""The language model's training data, and that a run can be broken off."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from calotype.plate.training import language
from calotype.plate.training.captions import Sample, background_in, has_held_out_pair, nouns_in, training_sample
from calotype.plate.training.objects import object_names
from calotype.plate.training.tokenizer import BOS, EOS, EXPAND, main, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer from few captions."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    make_tokenizer(captions_per_kind=10).save(str(path))
    return path


def _samples(count: int) -> list[Sample]:
    random = np.random.default_rng(0)
    return [training_sample(random) for _ in range(count)]


def test_nouns_are_those_of_the_caption() -> None:
    for sample in _samples(300):
        nouns = nouns_in(sample)
        assert len(nouns) == len(set(sample.facts.objects))
        known = {
            w
            for i in sample.facts.objects
            for w in (object_names()[i].name, object_names()[i].plural, *object_names()[i].synonyms)
        }
        assert set(nouns) <= known


def test_the_background_is_in_the_caption() -> None:
    for sample in _samples(300):
        words = background_in(sample)
        assert (words is None) == (sample.facts.background is None)
        if words is not None:
            assert words.removeprefix("on ") in sample.caption


def test_an_expansion_keeps_the_objects_and_says_more() -> None:
    random = np.random.default_rng(1)
    pairs = [pair for pair in (language.random_texts(random) for _ in range(600)) if pair[0] is not None]
    assert 150 < len(pairs) < 250
    longer = 0
    for prompt, caption in pairs:
        assert prompt is not None
        wanted = set(prompt.replace(",", "").split()) - {"a", "an", "and", "on"}
        assert wanted <= set(caption.replace(",", "").split()), (prompt, caption)
        longer += len(caption.split()) > len(prompt.replace(" and", "").split())
    assert longer > 0.8 * len(pairs)


def test_held_out_pairs_never_appear(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sample] = []

    def watched(random: np.random.Generator) -> Sample:
        seen.append(training_sample(random))
        return seen[-1]

    monkeypatch.setattr(language, "training_sample", watched)
    random = np.random.default_rng(2)
    for _ in range(200):
        language.random_texts(random)
    assert len(seen) >= 200
    assert not any(has_held_out_pair(s.facts.objects, s.scene.backdrop.name) for s in seen)


def test_only_the_expansion_is_learnt(tokenizer: Path) -> None:
    sequences = language.Sequences(tokenizer)
    prompt, caption = sequences.tokenizer.encode("fox").ids, sequences.tokenizer.encode("a big fox").ids
    ids, labels = sequences.row("fox", "a big fox")
    assert ids == [BOS, *prompt, EXPAND, *caption]
    assert labels == [language.IGNORED] * (1 + len(prompt)) + [*caption, EOS]
    assert sequences.row(None, "a big fox") == ([BOS, *caption], [*caption, EOS])


def test_batches_are_padded_and_fit_the_context(tokenizer: Path) -> None:
    batches = language.Sequences(tokenizer).batches(np.random.default_rng(0), 40)
    assert sum(len(ids) for ids, _ in batches) == 40
    for ids, labels in batches:
        assert ids.shape == labels.shape
        assert ids.shape[1] <= language.language_config().context_length
        assert ((ids == 0) <= (labels == language.IGNORED)).all()


def _arguments(run: Path, steps: int) -> argparse.Namespace:
    return argparse.Namespace(run=run, steps=steps, upper_steps=steps, batch=4, test=4, every=1, rate=1e-3, seed=0)


def test_a_broken_off_run_goes_on_bit_equal(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    torch.manual_seed(0)
    language.train(_arguments(tmp_path / "whole", 2))
    torch.manual_seed(0)
    save = language.save_state
    steps: list[int] = []
    breaks = [1, 2, 3, 0]

    def broken_off(path: Path, state: dict[str, object], *, step: int) -> None:
        save(path, state, step=step)
        steps.append(step)
        if len(steps) == breaks[0]:
            del breaks[0]
            raise KeyboardInterrupt

    monkeypatch.setattr(language, "save_state", broken_off)
    for seed in range(3):
        with pytest.raises(KeyboardInterrupt):
            language.train(_arguments(tmp_path / "broken", 2))
        torch.manual_seed(seed + 99)
    language.train(_arguments(tmp_path / "broken", 2))
    assert steps == [1, 2, 3, 4]
    whole, broken = (load_file(tmp_path / name / "language.safetensors") for name in ("whole", "broken"))
    assert whole.keys() == broken.keys()
    assert all(torch.equal(whole[key], broken[key]) for key in whole)
    lower = load_file(tmp_path / "whole" / "language-lower.safetensors")
    kept = {key for key in whole if torch.equal(lower[key], whole[key])}
    assert kept == {key for key in whole if key.startswith(("embedding.", "blocks.0.", "blocks.1."))}


def test_the_tokenizer_script_is_repeatable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first.json", "second.json"):
        monkeypatch.setattr("sys.argv", ["tokenizer", "--output", str(tmp_path / name), "--captions-per-kind", "5"])
        main()
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()
