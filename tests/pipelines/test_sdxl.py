"""Stable Diffusion XL and its refiner from diffusers folders: every stage is diffusers' own."""

import dataclasses
import json
import shutil

import pytest
import torch
from parity import error, generators

import calotype
from calotype.denoisers.guidance import ClassifierFree

from ..tiny_sd import sdxl_pipeline
from ..tiny_text_encoders import LONG
from .sd_parity import IGNORED, MASK, PICTURE, SIZE, check, ours_with, theirs_as

pytestmark = pytest.mark.filterwarnings(*IGNORED)
PROMPTS = ["a photo of a red fox", LONG]
SIZES = {"original_size": (64, 48), "crops_coords_top_left": (3, 5)}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdxl") / "base"
    theirs = sdxl_pipeline(folder)
    return calotype.load(folder), theirs


@pytest.fixture(scope="module")
def refiner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdxl") / "refiner"
    theirs = sdxl_pipeline(folder, refiner=True)
    return calotype.load(folder), theirs


def kind(name):
    import diffusers

    return getattr(diffusers, f"StableDiffusionXL{name}Pipeline")


@pytest.mark.parametrize("name", ["euler", "euler-linspace", "ddim", "euler_ancestral"])
def test_text_to_image(base, name):
    """With negative prompts, and second texts for the second encoder."""
    ours, theirs = ours_with(base[0], name), theirs_as(base[1], kind(""), name, add_watermarker=False)
    shared = {"prompt": PROMPTS, "prompt_2": ["a boat", "the river"], "negative_prompt": ["a cat", ""], **SIZE}
    shared |= {"num_inference_steps": 3, "guidance_scale": 3.0, "negative_prompt_2": ["two dogs", "the grass"]}
    check(ours, theirs, {**shared, "seed": [5, 9]}, {**shared, "generator": generators(5, 9)})


def test_what_the_model_is_told(base):
    """At another size, rescaled, without layers of CLIP; no negative prompt: its states are zeros."""
    ours, theirs = base
    shared = {"prompt": "a cat", "num_inference_steps": 2, "height": 48, "width": 48, **SIZES}
    shared |= {"target_size": (96, 80), "guidance_rescale": 0.7, "clip_skip": 1}
    assert ours.recipe.guidance_scale == 5.0
    check(ours, theirs, {**shared, "seed": 3}, {**shared, "generator": generators(3)})


def test_an_empty_negative_prompt_is_encoded(base):
    ours, theirs = base
    request = calotype.Request(prompt=PROMPTS, **SIZE)
    zeros = ours.encode(request).conditioning.negative
    assert not zeros.states.any()
    assert not zeros.pooled.any()
    empty = ours.encode(dataclasses.replace(request, negative_prompt="")).conditioning
    _, states, pooled, negative_pooled = theirs.encode_prompt(PROMPTS, negative_prompt=["", ""])
    assert error(empty.negative.states, states) < 1e-5
    assert error(empty.negative.pooled, negative_pooled) < 1e-5
    assert error(empty.positive.pooled, pooled) < 1e-5
    assert empty.positive.time_ids.tolist() == [[40, 56, 0, 0, 40, 56]] * 2


@pytest.mark.parametrize("name", ["euler", "dpmpp_2m", "euler_ancestral"])
def test_image_to_image_and_inpainting(base, name):
    ours = ours_with(base[0], name)
    shared = {"prompt": PROMPTS, "num_inference_steps": 4, "strength": 0.6, "guidance_scale": 4.0}
    mine = {**shared, "image": PICTURE, "seed": [3, 4]}
    other = {**shared, "image": torch.stack((PICTURE, PICTURE))}
    theirs = theirs_as(base[1], kind("Img2Img"), name, add_watermarker=False)
    check(ours, theirs, mine, {**other, "generator": generators(3, 4)})
    theirs = theirs_as(base[1], kind("Inpaint"), name, add_watermarker=False)
    masked = {**other, "mask_image": torch.stack((MASK, MASK)), **SIZE, "generator": generators(3, 4)}
    check(ours, theirs, {**mine, "mask_image": MASK}, masked, repaint=MASK)


def test_the_refiner_alone(refiner):
    """One text encoder, an aesthetic score, and an encoded empty prompt where no negative one is given."""
    ours, theirs = refiner
    picture = torch.stack((PICTURE, PICTURE))
    shared = {"prompt": PROMPTS, "num_inference_steps": 4, "strength": 0.5, "aesthetic_score": 7.5, **SIZES}
    other = {**shared, "image": picture, "generator": generators(3, 4)}
    check(ours, theirs, {**shared, "image": PICTURE, "seed": [3, 4]}, other)
    told = ours.encode(calotype.Request(prompt="a", crops_coords_top_left=(3, 5), **SIZE)).conditioning
    assert told.positive.time_ids.tolist() == [[40, 56, 3, 5, 6.0]]
    assert told.negative.time_ids.tolist() == [[40, 56, 0, 0, 2.5]]


@pytest.mark.parametrize("name", ["euler", "ddim"])
def test_the_base_hands_on_to_the_refiner(base, refiner, name):
    ours, theirs = ours_with(base[0], name), theirs_as(base[1], kind(""), name, add_watermarker=False)
    finer = ours_with(refiner[0], name)
    settings = {"add_watermarker": False, "requires_aesthetics_score": True, "force_zeros_for_empty_prompt": False}
    reference_finer = theirs_as(refiner[1], kind("Img2Img"), name, **settings)
    shared = {"prompt": PROMPTS, "num_inference_steps": 5}
    wanted = theirs(**shared, **SIZE, denoising_end=0.6, generator=generators(5, 9), output_type="latent").images
    left = ours(**shared, **SIZE, denoising_end=0.6, seed=[5, 9], output_type="latent").latents
    assert error(left[:, :, 0], wanted) < 1e-5
    other = {**shared, "image": wanted, "denoising_start": 0.6, "generator": generators(1, 2)}
    check(finer, reference_finer, {**shared, "image": left, "denoising_start": 0.6, "seed": [1, 2]}, other)


def test_the_parts_of_a_run_are_the_whole(base):
    """One model that hands on to itself."""
    ours = base[0]
    shared = {"prompt": "a cat", "num_inference_steps": 4, "seed": 1, "output_type": "latent"}
    whole = ours(**shared, **SIZE).latents
    left = ours(**shared, **SIZE, denoising_end=0.5).latents
    assert error(ours(**shared, image=left, denoising_start=0.5).latents, whole) < 1e-5
    assert torch.equal(ours(**shared, **SIZE, denoising_end=1.0).latents, whole)


def test_rows_are_alone_and_replay(base, tmp_path):
    ours = base[0]
    arguments = {"num_inference_steps": 2, "guidance_scale": 3.0, **SIZE, **SIZES}
    texts = {"prompt_2": ["a boat", "the river"], "negative_prompt": ["a cat", ""], "negative_prompt_2": ["a", "dog"]}
    together = ours(PROMPTS, seed=[7, 8], **texts, **arguments)
    for row in range(2):
        alone = ours(PROMPTS[row], seed=7 + row, **{name: value[row] for name, value in texts.items()}, **arguments)
        assert error(alone.latents, together.latents[row : row + 1]) < 1e-5
    together.save(tmp_path / "two.png")
    again = calotype.replay(tmp_path / "two-2.png")
    assert again.bit_equal
    assert again.remarks == ()
    assert again.manifest.extra["original_size"] == [64, 48]
    assert again.manifest.extra["negative_prompt_2"] == ["a", "dog"]
    made = ours("a cat", num_images_per_prompt=2, prompt_2="a boat", seed=4, **arguments)
    made.save(tmp_path / "pair.png")
    assert calotype.replay(tmp_path / "pair-2.png").bit_equal


def test_replay_without_a_negative_prompt(base, tmp_path):
    """Zeros stay zeros."""
    made = base[0]("a cat", num_inference_steps=2, seed=3, **SIZE)
    made.save(tmp_path / "cat.png")
    assert calotype.replay(tmp_path / "cat.png").bit_equal


def test_conditioning_stands_for_the_prompt(base):
    ours = base[0]
    arguments = {"num_inference_steps": 1, "output_type": "latent", "seed": 4, **SIZE}
    told = ours.encode(calotype.Request(prompt="a cat", **SIZE, **SIZES)).conditioning
    whole = ours("a cat", **arguments, **SIZES).latents
    assert torch.equal(ours(conditioning=told, **arguments).latents, whole)
    bare = dataclasses.replace(told.positive, time_ids=None)
    for given, message in (
        ({"conditioning": bare}, "a pooled vector, and time_ids"),
        ({"conditioning": told, "target_size": (8, 8)}, "already holds what the model is told"),
    ):
        with pytest.raises(ValueError, match=message):
            ours(**given, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"aesthetic_score": 6.0}, "aesthetic_score: sdxl does not use this argument"),
        ({"original_size": (8, 8.5)}, r"original_size is \[8, 8.5\]; it must be two whole numbers"),
        ({"negative_prompt_2": "a"}, "negative_prompt_2: give a negative_prompt for the first text encoder as well"),
        ({"denoising_end": 0.0}, "denoising_end is 0.0; it must be over 0, and at most 1"),
        ({"denoising_end": 0.01, "num_inference_steps": 2}, "leave none of the 2 steps"),
        ({"denoising_start": 1.0}, "denoising_start is 1.0; it must be over 0 and below 1"),
        ({"denoising_start": 0.5}, "image is not given; with denoising_start it must be another run's latents"),
        ({"denoising_start": 0.5, "image": PICTURE[None]}, r"image has shape \(1, 3, 40, 56\)"),
        ({"denoising_start": 0.5, "image": PICTURE, "strength": 0.5}, "strength: denoising_start goes on"),
        ({"denoising_start": 0.6, "denoising_end": 0.5}, "a run must start before it ends"),
        ({"denoising_start": 0.5, "image": torch.zeros(1, 4, 5, 9)}, "width is 56; .* those of 72 pixels"),
    ],
)
def test_mistakes(base, arguments, message):
    with pytest.raises(ValueError, match=message):
        base[0]("a cat", **{**SIZE, **arguments})


def test_the_refiner_takes_what_it_is_told(refiner):
    for name, value in (("target_size", (8, 8)), ("prompt_2", "a"), ("negative_prompt_2", "a"), ("prompt_3", "a")):
        with pytest.raises(ValueError, match=f"{name}: sdxl refiner does not use this argument"):
            refiner[0]("a cat", **{name: value})


def test_guidance_objects(base):
    arguments = {"num_inference_steps": 1, "output_type": "latent", "seed": 1, **SIZE}
    scaled = base[0]("a cat", guidance_scale=3.0, **arguments).latents
    assert torch.equal(base[0]("a cat", guidance=ClassifierFree(3.0), **arguments).latents, scaled)
    assert not torch.equal(base[0]("a cat", guidance=ClassifierFree(0.5), **arguments).latents, scaled)


def test_folders_that_do_not_fit(base, tmp_path):
    folder = tmp_path / "broken"
    base[1].save_pretrained(folder)
    path = folder / "model_index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "requires_aesthetics_score": True}))
    with pytest.raises(ValueError, match="has projection_dim 24; the transformer needs 32"):
        calotype.load(folder)
    path.write_text(json.dumps({**index, "force_zeros_for_empty_prompt": "no"}))
    with pytest.raises(ValueError, match="force_zeros_for_empty_prompt is 'no'; it must be true or false"):
        calotype.load(folder)
    path.write_text(json.dumps(index))
    shutil.rmtree(folder / "text_encoder")
    with pytest.raises(
        FileNotFoundError, match=r"has no folder 'text_encoder' \(encoders={'clip': folder} stands for it"
    ):
        calotype.load(folder)
