"""Stable Diffusion 2.x from a diffusers folder: every stage is diffusers' own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import error, generators

import calotype
from calotype.pipelines.image import ImagePipeline

from ..tiny_sd import sd_pipeline
from .sd_parity import IGNORED, MASK, PICTURE, SIZE, check, ours_with, theirs_as

pytestmark = pytest.mark.filterwarnings(*IGNORED)
PROMPTS = ["a photo of a red fox", "two dogs on the grass"]
SECOND = {"use_linear_projection": True, "attention_head_dim": (1, 2, 3), "upcast_attention": True}
"""What its UNets have, and those of 1.5 do not."""
Both = tuple[ImagePipeline, Any]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("sd2") / "model"
    theirs = sd_pipeline(folder, steps="ddim-v", **SECOND)
    return calotype.load(folder), theirs


def theirs_of(theirs: Any, kind: str, name: str) -> Any:
    import diffusers

    return theirs_as(theirs, getattr(diffusers, f"StableDiffusion{kind}Pipeline"), name, requires_safety_checker=False)


def test_the_folder_says_what_is_predicted(both: Both) -> None:
    """v; and the states of the text are those of the last layer that the folder has, normed."""
    ours, theirs = both
    assert ours.denoiser.prediction == "v_prediction"
    assert ours.recipe.sampler.name == "ddim"
    told = ours.encode(calotype.Request(prompt=PROMPTS, negative_prompt="a cat", **SIZE)).conditioning
    states, negative = theirs.encode_prompt(PROMPTS, "cpu", 1, True, ["a cat"] * 2)
    assert error(told.positive.states, states) < 1e-5
    assert error(told.negative.states, negative) < 1e-5


@pytest.mark.parametrize(("name", "size"), [("ddim-v", SIZE), ("euler-linspace", {"height": 48, "width": 32})])
def test_text_to_image(both: Both, name: str, size: dict[str, int]) -> None:
    ours, theirs = ours_with(both[0], name), theirs_of(both[1], "", name)
    shared = {"prompt": PROMPTS, "negative_prompt": ["", "a cat"], "num_inference_steps": 4, **size}
    check(ours, theirs, {**shared, "seed": [5, 9]}, {**shared, "generator": generators(5, 9)})


def test_image_to_image(both: Both) -> None:
    ours, theirs = both[0], theirs_of(both[1], "Img2Img", "ddim-v")
    shared = {"prompt": PROMPTS, "num_inference_steps": 4, "strength": 0.6}
    mine = {**shared, "image": PICTURE, "seed": [3, 4]}
    check(ours, theirs, mine, {**shared, "image": torch.stack((PICTURE, PICTURE)), "generator": generators(3, 4)})


def test_inpainting(both: Both) -> None:
    ours, theirs = both[0], theirs_of(both[1], "Inpaint", "ddim-v")
    shared = {"prompt": "a cat", "num_inference_steps": 4, "strength": 0.75}
    mine = {**shared, "image": PICTURE, "mask_image": MASK, "seed": 3}
    other = {**shared, "image": PICTURE[None], "mask_image": MASK[None], **SIZE}
    check(ours, theirs, mine, {**other, "generator": generators(3)}, repaint=MASK)


def test_it_is_saved(both: Both, tmp_path: Path) -> None:
    ours, _ = both
    ours.save(tmp_path / "saved")
    run: dict[str, Any] = {"prompt": "a cat", "num_inference_steps": 2, "seed": 1, "output_type": "latent", **SIZE}
    assert torch.equal(calotype.load(tmp_path / "saved")(**run).latents, ours(**run).latents)
