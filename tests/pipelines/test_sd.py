"""Stable Diffusion 1.5 from a diffusers folder: every stage is diffusers' own."""

import dataclasses
import json
import shutil

import numpy
import pytest
import torch
from parity import error, generators

import calotype
from calotype.denoisers.guidance import Distilled
from calotype.pipelines.finite import NonFiniteError
from calotype.pipelines.sd import sd_scheduler

from ..tiny_sd import SCHEDULERS, sd_pipeline
from ..tiny_text_encoders import LONG
from .sd_parity import IGNORED, MASK, PICTURE, SIZE, check, ours_with, reference, theirs_as

pytestmark = pytest.mark.filterwarnings(*IGNORED)
PROMPTS = ["a photo of a red fox", LONG]
TWICE = {"prompt": PROMPTS, "num_inference_steps": 4, "guidance_scale": 3.0}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd") / "model"
    theirs = sd_pipeline(folder)
    return calotype.load(folder), theirs


def kind(name):
    import diffusers

    return getattr(diffusers, f"StableDiffusion{name}Pipeline")


@pytest.mark.parametrize("name", SCHEDULERS)
def test_text_to_image(both, name):
    ours, theirs = ours_with(both[0], name), theirs_as(both[1], kind(""), name, requires_safety_checker=False)
    shared = {**TWICE, **SIZE, "negative_prompt": ["two dogs", ""]}
    check(ours, theirs, {**shared, "seed": [5, 9]}, {**shared, "generator": generators(5, 9)})


def test_the_loaded_scheduler_is_the_folders(both, monkeypatch):
    """At another size, without negative prompts, rescaled, and with layers of CLIP left out."""
    ours, theirs = both
    monkeypatch.setitem(vars(theirs.text_encoder), "text_model", theirs.text_encoder)  # transformers 5 has it no more
    shared = {"prompt": "a cat", "num_inference_steps": 3, "height": 48, "width": 48, "guidance_rescale": 0.6}
    shared["clip_skip"] = 1
    assert ours.recipe.guidance_scale == 7.5
    check(ours, theirs, {**shared, "seed": 3}, {**shared, "generator": generators(3)})


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_without_guidance(both, scale):
    ours, theirs = both
    shared = {"prompt": "a cat", "num_inference_steps": 1, "guidance_scale": scale, **SIZE}
    check(ours, theirs, {**shared, "seed": 3}, {**shared, "generator": generators(3)})


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "pndm"])
def test_image_to_image(both, name):
    ours, theirs = ours_with(both[0], name), theirs_as(both[1], kind("Img2Img"), name, requires_safety_checker=False)
    shared = {**TWICE, "strength": 0.6}
    mine = {**shared, "image": PICTURE, "seed": [3, 4]}
    check(ours, theirs, mine, {**shared, "image": torch.stack((PICTURE, PICTURE)), "generator": generators(3, 4)})


def test_pndm_begins_late_as_it_begins(both):
    """diffusers' pipeline then runs one evaluation off; given the timesteps of a late start, it agrees with ours."""
    ours, theirs = both[0], theirs_as(both[1], kind("Img2Img"), requires_safety_checker=False)
    shared = {"prompt": "a cat", "num_inference_steps": 5, "strength": 0.6}
    mine, other = {**shared, "image": PICTURE, "seed": 3}, {**shared, "image": PICTURE[None]}
    off, _ = reference(theirs, **other, generator=generators(3))
    assert error(ours(**mine, output_type="latent").latents, off[-1]) > 1e-3

    def late(num_inference_steps, strength, device):
        times = theirs.scheduler.timesteps[3:]
        times = torch.cat((times[:2], times[1:]))
        return times, len(times)

    theirs.get_timesteps = late
    check(ours, theirs, mine, {**other, "generator": generators(3)})


@pytest.mark.parametrize("name", ["euler", "ddim", "dpmpp_2m", "euler_ancestral"])
def test_inpainting(both, name):
    """Latents are those of diffusers in every step; pixels outside the mask are the picture's, here alone."""
    ours, theirs = ours_with(both[0], name), theirs_as(both[1], kind("Inpaint"), name, requires_safety_checker=False)
    shared = {**TWICE, "strength": 0.75}
    mine = {**shared, "image": PICTURE, "mask_image": MASK, "seed": [3, 4]}
    other = {**shared, "image": torch.stack((PICTURE,) * 2), "mask_image": torch.stack((MASK,) * 2), **SIZE}
    check(ours, theirs, mine, {**other, "generator": generators(3, 4)}, repaint=MASK)
    made = ours(**mine, output_type="pt").images
    outside = (MASK == 0).expand(3, -1, -1)
    assert torch.allclose(made[0][outside], PICTURE[outside], atol=1e-6)


def test_a_mask_of_everything_is_image_to_image(both):
    """Also at strength 1, the default, where diffusers starts from noise alone."""
    ours, theirs = both[0], theirs_as(both[1], kind("Inpaint"), requires_safety_checker=False)
    arguments = {"prompt": "a cat", "num_inference_steps": 2, "seed": 3, "output_type": "latent"}
    whole = torch.ones_like(MASK)
    painted = ours(**arguments, image=PICTURE, mask_image=whole).latents
    assert torch.equal(painted, ours(**arguments, image=PICTURE, strength=1.0).latents)
    steps, _ = reference(
        theirs,
        prompt="a cat",
        image=PICTURE[None],
        mask_image=whole[None],
        num_inference_steps=2,
        generator=generators(3),
        **SIZE,
    )
    assert error(painted, steps[-1]) > 1e-3


def test_steps_of_a_masked_run_resume_bit_equal(both):
    ours = ours_with(both[0], "euler_ancestral")
    request = calotype.Request(prompt="a", image=PICTURE, mask_image=MASK, strength=0.8, num_inference_steps=5, seed=1)
    encoded = ours.encode(request)
    steps = list(ours.denoise(encoded))
    again = list(ours.denoise(encoded, resume=steps[1].state))
    assert torch.equal(again[-1].latents, steps[-1].latents)
    assert torch.equal(again[0].latents, steps[2].latents)


def test_rows_are_alone_and_conditioning_stands_for_the_prompt(both):
    ours = ours_with(both[0], "euler_ancestral")
    arguments = {"num_inference_steps": 2, "output_type": "latent", **SIZE}
    together = ours(PROMPTS, seed=[7, 8], **arguments).latents
    for row, (prompt, seed) in enumerate(zip(PROMPTS, (7, 8), strict=True)):
        assert error(ours(prompt, seed=seed, **arguments).latents, together[row : row + 1]) < 1e-5
    told = ours.encode(calotype.Request(prompt=PROMPTS, num_inference_steps=2, **SIZE)).conditioning
    assert torch.equal(ours(conditioning=told, seed=[7, 8], **arguments).latents, together)


def test_long_prompts_are_cut_with_a_warning_or_read_in_chunks(both):
    ours, _ = both
    arguments = {"num_inference_steps": 1, "output_type": "latent", "seed": 1, **SIZE}
    cut = ours(LONG, **arguments)
    assert any("left out" in line for line in cut.warnings)
    chunks = dataclasses.replace(ours.encoders["clip"], long_prompts="chunks")
    whole = dataclasses.replace(ours, encoders={"clip": chunks})
    read = whole([LONG, "a cat"], **arguments)
    assert read.warnings == ()
    assert error(read.latents[:1], cut.latents) > 1e-4
    alone = whole("a cat", **{**arguments, "seed": 2}).latents
    assert error(read.latents[1:], alone) < 1e-5


def test_replay_and_pictures_of_each_prompt(both, tmp_path):
    ours, _ = both
    made = ours("a cat", num_images_per_prompt=2, clip_skip=1, num_inference_steps=3, seed=4, **SIZE)
    made.save(tmp_path / "cat.png")
    again = calotype.replay(tmp_path / "cat-2.png")
    assert again.bit_equal
    assert again.remarks == ()


def test_what_was_told_to_the_sampler_by_name_or_sigmas(both):
    """Another sampler on the checkpoint's own schedule, and a schedule of one's own."""
    ours, _ = both
    arguments = {"output_type": "latent", "seed": 1, **SIZE}
    euler = ours("a", sampler="euler", num_inference_steps=3, **arguments)
    assert euler.manifest.sampler["type"] == "Euler"
    assert euler.manifest.path == "exploding"
    ends = ours("a", sampler="euler", sigmas=[9.0, 2.0, 0.0], **arguments)
    assert ends.manifest.sigmas == (9.0, 2.0, 0.0)


def test_pipelines_set_some_options_themselves():
    entries = {"_class_name": "DDIMScheduler", **SCHEDULERS["ddim"][1], "clip_sample": True, "steps_offset": 0}
    assert sd_scheduler(entries).make(4).points[-1].time == 0.0
    assert sd_scheduler(entries).config.steps_offset == 1


def test_a_part_that_is_not_finite_is_named(both):
    from calotype.core.copies import moved

    broken = moved(both[0].denoiser, torch.device("cpu"), torch.float64)
    broken.unet.mid_block.resnets[0].conv1.bias[0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"denoise, step 0 of 2 .*, the middle block"):
        dataclasses.replace(both[0], denoiser=broken)("a cat", num_inference_steps=2, **SIZE)


def test_half_precision(both):
    half = both[0].to(dtype="bfloat16")
    arguments = {"num_inference_steps": 2, "output_type": "latent", "seed": 1, **SIZE}
    made = half("a cat", **arguments).latents
    assert made.dtype is torch.float32
    assert error(made, both[0]("a cat", **arguments).latents) < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"height": 41}, "height is 41; it must be a multiple of 8, such as 40 or 48"),
        ({"prompt_2": "a"}, "prompt_2: sd does not use this argument"),
        ({"clip_skip": 9}, "clip_skip is 9; this text encoder can skip 0 to 3 layers"),
        ({"guidance": Distilled(2.0)}, "this model is told no value"),
        ({"num_inference_steps": 2000}, "num_inference_steps is 2000; it must be from 1 to 1000"),
        ({"denoising_end": 0.5}, "denoising_end: sd does not use"),
    ],
)
def test_mistakes(both, arguments, message):
    with pytest.raises(ValueError, match=message):
        both[0]("a cat", **{**SIZE, **arguments})


def test_without_its_encoder_it_reads_no_prompts(both):
    bare = dataclasses.replace(both[0], encoders={})
    with pytest.raises(ValueError, match=r"^encoders has no 'clip'; this model reads prompts with clip$"):
        bare("a cat", **SIZE)
    given = both[0].encode(calotype.Request(prompt="a cat", **SIZE)).conditioning
    assert bare(conditioning=given, num_inference_steps=1, output_type="latent", **SIZE).latents is not None


def test_folders_whose_parts_do_not_fit(both, tmp_path):
    folder = tmp_path / "broken"
    both[1].save_pretrained(folder)
    path = folder / "text_encoder" / "config.json"
    entries = json.loads(path.read_text())
    path.write_text(json.dumps({**entries, "hidden_size": 48}))
    with pytest.raises(ValueError, match="has hidden_size 48; the transformer needs 32"):
        calotype.load(folder)
    path.write_text(json.dumps(entries))
    path = folder / "unet" / "config.json"
    entries = json.loads(path.read_text())
    path.write_text(json.dumps({**entries, "in_channels": 5}))
    with pytest.raises(ValueError, match="the UNet reads 5 channels and makes 4; it must read as many"):
        calotype.load(folder)
    path.write_text(json.dumps(entries))
    weights = next((folder / "unet").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match="truncated"):
        calotype.load(folder)
    shutil.rmtree(folder / "unet")
    with pytest.raises(FileNotFoundError, match="no folder 'unet'"):
        calotype.load(folder)


def test_scale_below_1_is_said_to_do_nothing(both):
    arguments = {"num_inference_steps": 1, "output_type": "latent", "seed": 1, **SIZE}
    made = both[0]("a cat", guidance_scale=0.5, **arguments)
    assert any("guidance_scale 0.5 has no effect" in line for line in made.warnings)
    assert numpy.isfinite(made.latents.numpy()).all()
