"""UNets that were made for inpainting, of Stable Diffusion 1.5 and XL: every step is diffusers' own."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from parity import error, generators

import calotype
from calotype.pipelines.image import ImagePipeline

from ..tiny_sd import sd_pipeline, sdxl_pipeline
from .sd_parity import IGNORED, MASK, PICTURE, SIZE, check, ours_with, theirs_as

pytestmark = pytest.mark.filterwarnings(*IGNORED)
PROMPTS = ["a photo of a red fox", "two dogs"]
SHARED: dict[str, Any] = {"prompt": PROMPTS, "negative_prompt": ["a cat", ""], "num_inference_steps": 3}
OTHER_MASK = MASK.roll(8, dims=2)
KINDS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "sd": (sd_pipeline, "StableDiffusionInpaintPipeline", {"requires_safety_checker": False}),
    "sdxl": (sdxl_pipeline, "StableDiffusionXLInpaintPipeline", {"add_watermarker": False}),
}
Models = dict[str, tuple[ImagePipeline, Any, Path]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("inpainting")
    made = {name: make(folder / name, in_channels=9) for name, (make, _, _) in KINDS.items()}
    return {name: (calotype.load(folder / name), theirs, folder / name) for name, theirs in made.items()}


def reference(models: Models, name: str, sampler: str) -> tuple[ImagePipeline, Any]:
    import diffusers

    _, kind, settings = KINDS[name]
    ours, theirs, _ = models[name]
    return ours_with(ours, sampler), theirs_as(theirs, getattr(diffusers, kind), sampler, **settings)


@pytest.mark.parametrize(
    ("name", "sampler", "strength"),
    [("sd", "euler", 1.0), ("sd", "ddim", 0.7), ("sdxl", "euler_ancestral", 1.0), ("sdxl", "dpmpp_2m", 0.7)],
)
def test_steps_are_those_of_diffusers(models: Models, name: str, sampler: str, strength: float) -> None:
    """At strength 1 runs begin with noise alone, below it with the noised picture; latents are free everywhere."""
    ours, theirs = reference(models, name, sampler)
    shared = {**SHARED, "strength": strength, "guidance_scale": 3.0}
    mine = {**shared, "image": PICTURE, "mask_image": torch.stack((MASK, OTHER_MASK)), "seed": [3, 4]}
    other = {**shared, "image": torch.stack((PICTURE,) * 2), "mask_image": torch.stack((MASK, OTHER_MASK)), **SIZE}
    check(ours, theirs, mine, {**other, "generator": generators(3, 4)}, repaint=MASK * OTHER_MASK)


@pytest.mark.parametrize("name", KINDS)
def test_saved_as_the_class_for_inpainting(models: Models, name: str, tmp_path: Path) -> None:
    """Also where the folder that it came from says another one."""
    import diffusers

    ours, _, folder = models[name]
    kind = KINDS[name][1]
    assert json.loads((folder / "model_index.json").read_text())["_class_name"] != kind
    ours.save(tmp_path / "saved")
    theirs = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "saved")
    assert type(theirs).__name__ == kind
    assert theirs.unet.config.in_channels == 9
    assert calotype.load(tmp_path / "saved").masking == ours.masking


def test_what_is_read_beside_the_latents_is_made_once(models: Models) -> None:
    """The mask by cell, and a sample of the covered picture's latents, drawn after the initial noise."""
    ours, theirs = reference(models, "sd", "euler")
    request = calotype.Request(prompt="a cat", image=PICTURE, mask_image=MASK, seed=3)
    encoded = ours.encode(request)
    assert encoded.source is None
    assert encoded.beside is not None
    (generator,) = generators(3)
    torch.randn(1, 4, 5, 7, generator=generator)
    pixels = (2 * PICTURE - 1) * (MASK < 0.5)
    mask, covered = theirs.prepare_mask_latents(
        MASK[None], pixels[None], 1, 40, 56, torch.float32, torch.device("cpu"), generator, False
    )
    assert torch.equal(encoded.beside[:, :1, 0], mask)
    assert error(encoded.beside[:, 1:, 0], covered.detach()) < 1e-5
    assert torch.equal(encoded.prompt.positive.references[0], encoded.beside)


def test_rows_are_alone_and_the_outside_is_kept(models: Models) -> None:
    ours = models["sd"][0]
    arguments = {**SHARED, "image": PICTURE, "output_type": "pt"}
    masks = torch.stack((MASK, OTHER_MASK))
    together = ours(**arguments, mask_image=masks, seed=[7, 8])
    for row in range(2):
        texts = {name: arguments[name][row] for name in ("prompt", "negative_prompt")}
        alone = ours(**{**arguments, **texts}, mask_image=masks[row], seed=7 + row)
        assert error(alone.latents, together.latents[row : row + 1]) < 1e-5
        outside = (masks[row] == 0).expand(3, -1, -1)
        assert numpy.allclose(together.images[row][outside], PICTURE[outside], atol=1e-6)


def test_strength_0_and_given_latents(models: Models) -> None:
    ours = models["sd"][0]
    arguments = {"prompt": "a cat", "image": PICTURE, "mask_image": MASK, "seed": 3, "output_type": "latent"}
    unchanged = ours(**arguments, strength=0.0).latents
    assert torch.equal(unchanged, ours.vae.encode((2 * PICTURE - 1)[None, :, None]).float())
    drawn = torch.randn(1, 4, 1, 5, 7, generator=generators(3)[0])
    given = {**arguments, "num_inference_steps": 2, "latents": drawn}
    assert not torch.equal(ours(**given).latents, ours(**arguments, num_inference_steps=2).latents)  # the posterior's
    assert torch.equal(ours(**given).latents, ours(**given).latents)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "image is not given; this model was made for inpainting"),
        ({"image": PICTURE}, "mask_image is not given; this model was made for inpainting"),
    ],
)
def test_other_tasks_are_refused(models: Models, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models["sd"][0]("a cat", **arguments)


def test_other_channels_are_refused(models: Models) -> None:
    config = models["sd"][2] / "unet/config.json"
    text = config.read_text()
    config.write_text(json.dumps({**json.loads(text), "in_channels": 8}))
    with pytest.raises(ValueError, match=r"the UNet reads 8 channels and makes 4; it must read as many, or for .* 9"):
        calotype.load(models["sd"][2])
    config.write_text(text)
