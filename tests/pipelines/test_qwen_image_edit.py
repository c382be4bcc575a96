"""Qwen-Image-Edit and Qwen-Image-Edit-Plus from a diffusers folder: every stage is diffusers' own."""

import dataclasses
import json
import sys
from contextlib import contextmanager, nullcontext

import numpy
import pytest
import torch
from parity import error
from PIL import Image

import calotype
from calotype.core.offload import resident
from calotype.denoisers.patches import unpatchify
from calotype.denoisers.qwen_image import QwenImageConfig, QwenImageDenoiser
from calotype.pipelines.qwen_image_edit import QwenImageEditing, QwenImageFirstEditFamily, with_positions

from ..tiny_qwen_image import qwen_image_edit_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

PROMPT = "the fox on the grass of the two dogs"
SIZE = {"height": 24, "width": 40}
AREAS = {"seen": 60**2, "read": 50**2}
FIRST = "QwenImageEditPipeline"


@pytest.fixture(scope="module")
def newest(tmp_path_factory):
    """Ours and theirs of 2511; 4 pixels a latent cell, small copies of pictures."""
    folder = tmp_path_factory.mktemp("qwen-image-edit") / "2511"
    theirs = qwen_image_edit_pipeline(folder, zero_cond_t=True)
    pipe = calotype.load(folder)
    assert pipe.editing == QwenImageEditing(multiple=8)
    return dataclasses.replace(pipe, editing=dataclasses.replace(pipe.editing, **AREAS)), theirs


@pytest.fixture(scope="module")
def ours(newest):
    return newest[0]


@pytest.fixture(scope="module", params=["2509", "2511"])
def both(request, newest):
    """Both of 2511, and of 2509, where references are modulated as all else."""
    ours, theirs = newest
    if request.param == "2511":
        return newest
    from diffusers import QwenImageEditPlusPipeline, QwenImageTransformer2DModel

    config = dict(theirs.transformer.config) | {"zero_cond_t": False}
    transformer = QwenImageTransformer2DModel(**{key: config[key] for key in config if not key.startswith("_")})
    transformer.load_state_dict(theirs.transformer.state_dict())
    older = QwenImageEditPlusPipeline(**{**theirs.components, "transformer": transformer.eval()})
    older.set_progress_bar_config(disable=True)
    denoiser = QwenImageDenoiser(QwenImageConfig.from_entries(config))
    denoiser.load_state_dict(resident(ours.denoiser, ours.denoiser.source, device=ours.device).state_dict())
    return dataclasses.replace(ours, denoiser=denoiser.requires_grad_(False).eval()), older


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Ours and theirs of the first model, whose two copies of the picture are one."""
    folder = tmp_path_factory.mktemp("qwen-image-edit") / "first"
    theirs = qwen_image_edit_pipeline(folder, FIRST)
    pipe = calotype.load(folder)
    assert pipe.editing == QwenImageEditing(multiple=8, seen=1024**2, most=1)
    small = dataclasses.replace(pipe.editing, seen=AREAS["read"], read=AREAS["read"])
    return dataclasses.replace(pipe, editing=small), theirs


def picture(width, height, seed=0):
    values = numpy.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=numpy.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)


@contextmanager
def told_what_is_a_picture(model):
    """transformers' three-axis positions, which it takes only from a caller that says which tokens are a picture's."""
    forward = model.forward

    def with_kinds(*args, input_ids, **others):
        kinds = (input_ids == model.config.image_token_id).int()
        return forward(*args, input_ids=input_ids, mm_token_type_ids=kinds, **others)

    model.forward = with_kinds
    yield
    del model.forward


def reference(pipe, monkeypatch, **arguments):
    """Each step's latents and the pictures [N, H, W, 3] of diffusers' pipeline."""
    module = sys.modules[type(pipe).__module__]
    if type(pipe).__name__ == FIRST:
        sides = module.calculate_dimensions
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: sides(AREAS["read"], ratio))
    else:
        monkeypatch.setattr(module, "CONDITION_IMAGE_SIZE", AREAS["seen"])
        monkeypatch.setattr(module, "VAE_IMAGE_SIZE", AREAS["read"])
    steps = []

    def keep(_, index, time, values):
        packed = values["latents"]
        shape = (len(packed), packed.shape[-1] // 4, 1, SIZE["height"] // 4, SIZE["width"] // 4)
        steps.append(unpatchify(packed.clone(), shape, 2))
        return values

    return steps, pipe(**arguments, **SIZE, output_type="np", callback_on_step_end=keep).images


def check(pair, monkeypatch, positions, image):
    """Steps and pictures of an edit of `image`, of ours and theirs."""
    ours, theirs = pair
    shared = {"prompt": PROMPT, "negative_prompt": "a cat", "true_cfg_scale": 2.5, "num_inference_steps": 3}
    shared["image"] = image
    told = told_what_is_a_picture(theirs.text_encoder) if positions == "axes" else nullcontext()
    with told:
        steps, pictures = reference(theirs, monkeypatch, **shared, generator=[torch.Generator().manual_seed(5)])
    found = list(with_positions(ours, positions).stream(**shared, **SIZE, seed=5, output_type="np"))
    assert len(found) == len(steps)
    for step, expected in zip(found, steps, strict=True):
        assert error(step.latents, expected) < 1e-5
    assert numpy.abs(numpy.asarray(ours.decode(found[-1]).images) - pictures).max() < 1e-4


@pytest.mark.parametrize("positions", ["axes", "diffusers"])
def test_editing(both, monkeypatch, positions):
    """Pictures of several sizes; the positions that the model was trained with, and those that diffusers gives it."""
    check(both, monkeypatch, positions, [picture(70, 41), picture(33, 60, seed=1)])


@pytest.mark.parametrize("positions", ["axes", "diffusers"])
def test_the_first_model(first, monkeypatch, positions):
    check(first, monkeypatch, positions, picture(70, 41))


def test_the_first_model_changes_one_picture(first, tmp_path):
    """A row is that row alone; the picture is needed, gives the size, and can be in the conditioning."""
    ours, _ = first
    prompts, pictures = ["a red fox", "two old dogs on the river"], [picture(70, 41), picture(70, 41, seed=1)]
    arguments = {"num_inference_steps": 2, "output_type": "latent", **SIZE}
    together = ours(prompts, image=[[each] for each in pictures], seed=[7, 8], **arguments).latents
    for row in range(2):
        alone = ours(prompts[row], image=pictures[row], seed=7 + row, **arguments).latents
        assert error(alone, together[row : row + 1]) < 1e-5
    encoded = ours.encode(calotype.Request(prompt=prompts[0], image=pictures[0], **SIZE))
    assert torch.equal(ours(conditioning=encoded.conditioning, seed=7, **arguments).latents, alone_of(ours, arguments))
    with pytest.raises(ValueError, match="this model changes a picture, and there is none"):
        ours(prompts[0], **arguments)
    with pytest.raises(ValueError, match="image holds 2 pictures for a prompt; this model looks at 1"):
        ours(prompts[0], image=pictures, **arguments)
    small = dataclasses.replace(ours, editing=dataclasses.replace(ours.editing, made=40**2))
    assert small("a fox", image=picture(70, 35), num_inference_steps=1, seed=0).images[0].size == (64, 32)
    dataclasses.replace(ours, editing=whole_size(ours)).save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "model_index.json").read_text())["_class_name"] == FIRST
    again = calotype.load(tmp_path / "saved")
    assert again.editing == whole_size(ours)
    again = dataclasses.replace(again, editing=ours.editing)
    assert torch.equal(again("a red fox", image=pictures[0], seed=7, **arguments).latents, alone_of(ours, arguments))


class MeanFamily(QwenImageFirstEditFamily):
    """Starts from the posterior's mean."""

    @property
    def draws_posterior(self):
        return False


def test_inpainting_with_the_first_model(first, monkeypatch):
    """diffusers looks at the sample of the posterior that it starts from; here the model looks at the mean, as it does
    where it edits. So both start from the mean to be compared."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_inpaint as module

    ours, theirs = first
    ours = dataclasses.replace(ours, family=MeanFamily(scheduler=ours.family.scheduler))
    theirs = module.QwenImageEditInpaintPipeline(**theirs.components)
    theirs.set_progress_bar_config(disable=True)
    start, mask = picture(64, 32), Image.new("L", (64, 32))
    mask.paste(255, (16, 8, 40, 24))
    sides = module.calculate_dimensions
    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: sides(AREAS["read"], ratio))
    monkeypatch.setattr(module, "retrieve_latents", lambda out, generator: out.latent_dist.mode())
    shared = {"prompt": PROMPT, "image": start, "mask_image": mask, "strength": 0.7, "num_inference_steps": 4}
    shared |= {"negative_prompt": "a cat", "true_cfg_scale": 2.5}
    steps = []

    def keep(_, index, time, values):
        packed = values["latents"]
        steps.append(unpatchify(packed.clone(), (len(packed), packed.shape[-1] // 4, 1, 8, 16), 2))
        return values

    theirs(**shared, generator=[torch.Generator().manual_seed(5)], output_type="np", callback_on_step_end=keep)
    found = list(with_positions(ours, "diffusers").stream(**shared, seed=5))
    assert len(found) == len(steps) == 3
    for step, expected in zip(found, steps, strict=True):
        assert error(step.latents, expected) < 1e-5


def whole_size(pipe):
    return dataclasses.replace(pipe.editing, seen=1024**2, read=1024**2)


def alone_of(pipe, arguments):
    return pipe("a red fox", image=picture(70, 41), seed=7, **arguments).latents


def test_one_picture_and_no_negative_prompt(both, monkeypatch):
    ours, theirs = both
    shared = {"prompt": PROMPT, "num_inference_steps": 2, "image": picture(80, 40)}
    with told_what_is_a_picture(theirs.text_encoder):
        steps, _ = reference(theirs, monkeypatch, **shared, generator=[torch.Generator().manual_seed(1)])
    found = list(ours.stream(**shared, **SIZE, seed=1))
    for step, expected in zip(found, steps, strict=True):
        assert error(step.latents, expected) < 1e-5


def test_rows_are_alone(ours):
    """Several prompts, with pictures of their own or the same (diffusers takes one prompt at a time)."""
    prompts = ["a red fox", "two old dogs on the river and the boat"]
    pictures = [picture(70, 41, seed=n) for n in range(3)]
    arguments = {"negative_prompt": "a", "num_inference_steps": 2, "output_type": "latent", **SIZE}
    for image in ([[pictures[0], pictures[1]], [pictures[2], pictures[0]]], [pictures[1]]):
        together = ours(prompts, image=image, seed=[7, 8], **arguments).latents
        for row in range(2):
            mine = image[row] if isinstance(image[0], list) else image
            alone = ours(prompts[row], image=mine, seed=7 + row, **arguments).latents
            assert error(alone, together[row : row + 1]) < 1e-5


def test_pictures_matter_and_so_does_their_place(ours):
    one, other = picture(70, 41), picture(70, 41, seed=2)
    arguments = {"num_inference_steps": 1, "output_type": "latent", "seed": 0, **SIZE}
    first, swapped, lone, none = (
        ours(PROMPT, image=image, **arguments).latents for image in ([one, other], [other, one], [one], None)
    )
    assert min(error(first, each) for each in (swapped, lone, none)) > 1e-3


def test_the_last_picture_gives_the_size(ours):
    editing = QwenImageEditing(multiple=16)
    pictures = [torch.zeros(3, 41, 70), torch.zeros(3, 600, 337)]
    assert editing.size(pictures) == (768, 1376)
    assert tuple(editing.fitted(pictures[0]).shape) == (3, 768, 1344)
    small = dataclasses.replace(ours, editing=dataclasses.replace(ours.editing, made=40**2))
    made = small(PROMPT, image=[picture(30, 30), picture(70, 35)], num_inference_steps=1, seed=0)
    assert made.images[0].size == (64, 32)


def test_a_replay_needs_the_pictures(ours, tmp_path):
    pictures = [picture(70, 41), picture(33, 60, seed=1)]
    made = ours(PROMPT, image=pictures, negative_prompt="a cat", num_inference_steps=2, seed=3, **SIZE)
    made.save(tmp_path / "edited.png")
    assert made.manifest.task == "edit"
    again = calotype.replay(tmp_path / "edited.png", image=pictures, pipeline=ours)
    assert again.bit_equal


def test_conditioning_stands_for_prompt_and_pictures(ours):
    arguments = {"num_inference_steps": 1, "output_type": "latent", "seed": 4, **SIZE}
    request = calotype.Request(prompt=PROMPT, image=picture(70, 41), negative_prompt="a cat", **SIZE)
    told = ours.encode(request).conditioning
    whole = ours(PROMPT, image=picture(70, 41), negative_prompt="a cat", **arguments).latents
    assert torch.equal(whole, ours(conditioning=told, **arguments).latents)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_sequence_length": 20}, "max_sequence_length: qwen-image-edit does not use this argument"),
        ({"image": picture(2, 300)}, "image, picture 1: is 2x300; one side may be 100 times the other at most"),
        ({"guidance_scale": 2.0, "true_cfg_scale": 2.0}, "are the same for this model"),
        ({"prompt": "a <|image_pad|> cat"}, "which stands for a picture"),
    ],
)
def test_mistakes(ours, arguments, message):
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        ours(**{"prompt": "a cat", "image": picture(70, 41), "num_inference_steps": 1, **SIZE, **arguments})
