"""Prompts that a language model rewrites first."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import fake_pipeline

from calotype.pipelines.base import last
from calotype.pipelines.files import read_manifest
from calotype.pipelines.manifest import Manifest
from calotype.pipelines.replay import Arguments
from calotype.pipelines.request import Request


@dataclass
class Said:
    text: str


@dataclass
class Expander:
    """Says more of everything but the sea."""

    asked: list[str] = field(default_factory=list)

    def expand(self, prompt: str) -> Said:
        self.asked.append(prompt)
        return Said("" if prompt == "the sea" else f" a large {prompt} at night ")


ARGUMENTS: Any = {"seed": 3, "output_type": "latent"}


def test_the_longer_prompt_is_drawn_and_both_are_recorded(tmp_path: Path):
    pipe, expander = fake_pipeline(), Expander()
    result = pipe(["fox", "cat", "fox"], expand=expander, seed=3)
    longer = ("a large fox at night", "a large cat at night", "a large fox at night")
    assert expander.asked == ["fox", "cat"]
    assert torch.equal(result.latents, pipe(list(longer), seed=3).latents)
    assert result.manifest is not None and result.manifest.prompts == longer
    assert result.manifest.unexpanded == ("fox", "cat", "fox")
    path, *_ = result.save(tmp_path / "a.png")
    assert read_manifest(path).unexpanded == ("fox", "cat", "fox")


def test_it_is_part_of_the_request_so_that_the_stages_compose():
    pipe = fake_pipeline()
    called = pipe("fox", expand=Expander(), num_images_per_prompt=2, **ARGUMENTS)
    streamed = pipe.decode(last(pipe.stream("fox", expand=Expander(), num_images_per_prompt=2, **ARGUMENTS)))
    assert torch.equal(called.latents, streamed.latents) and called.manifest == streamed.manifest


def test_a_replay_needs_no_language_model():
    pipe = fake_pipeline()
    result = pipe("fox", expand=Expander(), **ARGUMENTS)
    assert result.manifest is not None
    again = Arguments.of(result.manifest, image=None, mask_image=None).run(pipe, progress=False)
    assert torch.equal(again.latents, result.latents)


def test_a_prompt_with_nothing_to_add_stays():
    result = fake_pipeline()("the sea", expand=Expander(), **ARGUMENTS)
    assert result.manifest is not None and result.manifest.prompts == ("the sea",)
    assert result.warnings == ("expand: the language model had nothing to say to 'the sea'; it stays as it is",)


def test_manifests_of_before_still_load():
    manifest = fake_pipeline()("fox", **ARGUMENTS).manifest
    assert manifest is not None and manifest.unexpanded is None
    entries = json.loads(manifest.to_json())
    del entries["unexpanded"]
    assert Manifest.from_json(json.dumps(entries)) == manifest


def test_mistakes():
    conditioning = fake_pipeline().encode(Request(prompt="fox", **ARGUMENTS)).conditioning
    with pytest.raises(ValueError, match="expand is of type str; it must be a language model"):
        fake_pipeline()("fox", expand="smollm", **ARGUMENTS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="expand: conditioning is given"):
        fake_pipeline()(conditioning=conditioning, expand=Expander(), **ARGUMENTS)


def test_the_choices_are_checked_before_anything_is_expanded():
    expander = Expander()
    with pytest.raises(ValueError, match="num_inference_steps is 0"):
        fake_pipeline()("fox", expand=expander, num_inference_steps=0)
    with pytest.raises(ValueError, match="width"):
        fake_pipeline()("fox", expand=expander, width=13)
    assert expander.asked == []
