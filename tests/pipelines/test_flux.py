"""FLUX.1 from a diffusers folder: every stage is diffusers' own."""

import dataclasses
import json

import numpy
import pytest
import torch
from parity import error, generators
from PIL import Image

import calotype
from calotype.denoisers.guidance import Distilled, Unguided
from calotype.denoisers.patches import unpatchify
from calotype.pipelines.flux import SCHEDULERS

from ..tiny_flux import flux_pipeline

PROMPTS = ["a photo of a red fox", "two old dogs on the grass and a cat"]
SIZE = {"height": 24, "width": 40}
CELLS = (6, 10)


@pytest.fixture(scope="module", params=[True, False], ids=["dev", "schnell"])
def both(request, tmp_path_factory):
    """Ours, theirs, and whether it is dev."""
    folder = tmp_path_factory.mktemp("flux") / "model"
    theirs = flux_pipeline(request.param, folder)
    return calotype.load(folder), theirs, request.param


@pytest.fixture(scope="module")
def dev(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flux") / "dev"
    theirs = flux_pipeline(True, folder)
    return calotype.load(folder), theirs


def reference(pipe, cells=CELLS, **arguments):
    """Each step's latents and the pictures [N, H, W, 3] of a diffusers pipeline."""
    steps = []

    def keep(_, index, time, values):
        packed = values["latents"]
        shape = (len(packed), packed.shape[-1] // 4, 1, *cells)
        steps.append(unpatchify(packed.clone(), shape, 2))
        return values

    pictures = pipe(**arguments, output_type="np", callback_on_step_end=keep).images
    return steps, pictures


def check(ours, theirs, mine, other):
    """Latents of every step within 1e-5, pixels within 1e-4."""
    steps, pictures = reference(theirs, **other)
    found = list(ours.stream(**mine))
    assert len(found) == len(steps)
    for step, expected in zip(found, steps, strict=True):
        assert error(step.latents, expected) < 1e-5
    made = ours.decode(found[-1])
    assert numpy.abs(numpy.asarray(made.images) - pictures).max() < 1e-4


def test_text_to_image(both):
    ours, theirs, is_dev = both
    shared = {"num_inference_steps": 3, "max_sequence_length": 19, **SIZE}
    scale = {"guidance_scale": 2.7} if is_dev else {}
    mine = {"prompt": PROMPTS, "seed": [5, 9], "output_type": "np", **shared, **scale}
    other = {"prompt": PROMPTS, "generator": generators(5, 9), **shared, **scale}
    check(ours, theirs, mine, other)


def test_conditioning_and_schedule(both):
    ours, theirs, _ = both
    request = calotype.Request(prompt=PROMPTS, num_inference_steps=4, max_sequence_length=11, **SIZE)
    encoded = ours.encode(request)
    states, pooled, _ = theirs.encode_prompt(PROMPTS, None, max_sequence_length=11)
    assert error(encoded.conditioning.positive.states, states) < 1e-5
    assert error(encoded.conditioning.positive.pooled, pooled) < 1e-5
    theirs(PROMPTS[0], num_inference_steps=4, max_sequence_length=11, output_type="latent", **SIZE)
    sigmas = encoded.plan.schedule.sigmas
    assert sigmas == pytest.approx(theirs.scheduler.sigmas.tolist(), abs=1e-6)


def test_classifier_free_guidance_and_a_second_prompt(dev):
    ours, theirs = dev
    shared = {
        "prompt": PROMPTS,
        "prompt_2": ["a boat", "the river"],
        "negative_prompt": ["a cat", ""],
        "negative_prompt_2": ["the grass", "two dogs"],
        "true_cfg_scale": 2.5,
        "num_inference_steps": 2,
        "max_sequence_length": 9,
        **SIZE,
    }
    check(ours, theirs, {**shared, "seed": [1, 2], "output_type": "np"}, {**shared, "generator": generators(1, 2)})


@pytest.mark.parametrize("strength", [0.65, 1.0, 0.3])
def test_image_to_image(dev, strength):
    """The picture is given once per row there: one for all would be drawn by the first row's generator alone."""
    from diffusers import FluxImg2ImgPipeline

    ours, theirs = dev
    theirs = FluxImg2ImgPipeline.from_pipe(theirs)
    theirs.set_progress_bar_config(disable=True)
    picture = torch.rand(3, 24, 40, generator=torch.Generator().manual_seed(0))
    shared = {"prompt": PROMPTS, "strength": strength, "num_inference_steps": 5, "max_sequence_length": 8}
    shared["guidance_scale"] = 3.1
    mine = {**shared, "image": picture, "seed": [3, 4], "output_type": "np"}
    other = {**shared, "image": torch.stack((picture, picture)), "generator": generators(3, 4), **SIZE}
    check(ours, theirs, mine, other)


def test_inpainting_keeps_what_is_outside(dev):
    ours, _ = dev
    picture = torch.rand(3, 24, 40, generator=torch.Generator().manual_seed(4))
    mask = torch.zeros(1, 24, 40)
    mask[:, 8:16, 8:24] = 1
    arguments = {"num_inference_steps": 2, "max_sequence_length": 8, "output_type": "pt", "seed": 2}
    made = ours("a cat", image=picture, mask_image=mask, **arguments).images
    outside = (mask == 0).expand(3, -1, -1)
    assert torch.allclose(made[0][outside], picture[outside], atol=1e-6)
    assert not torch.allclose(made[0][~outside], picture[~outside], atol=1e-2)


def test_strength_0_is_the_round_trip(dev):
    ours, _ = dev
    picture = torch.rand(3, 24, 40, generator=torch.Generator().manual_seed(5))
    arguments = {"image": picture, "strength": 0, "output_type": "latent", "max_sequence_length": 8}
    one, other = (ours("a cat", seed=seed, **arguments).latents for seed in (1, 2))
    assert torch.equal(one, other)
    assert torch.equal(one, ours.vae.encode(picture[None, :, None] * 2 - 1))


def test_several_pictures_of_each_prompt_and_their_replay(dev, tmp_path):
    """Pictures, second prompts and negative prompts go to the rows of their prompts, and come back from the file."""
    ours, _ = dev
    pictures = [torch.rand(3, 24, 40, generator=torch.Generator().manual_seed(n)) for n in (6, 7)]
    paths = []
    for n, picture in enumerate(pictures):
        paths.append(tmp_path / f"{n}.png")
        Image.fromarray((picture.permute(1, 2, 0) * 255).byte().numpy()).save(paths[-1])
    arguments = {"num_inference_steps": 2, "max_sequence_length": 9, "true_cfg_scale": 2.0, "strength": 1.0}
    second, negative = ["the river", "a boat"], ["two dogs", ""]
    made = ours(
        PROMPTS, prompt_2=second, negative_prompt=negative, num_images_per_prompt=2, image=paths, seed=3, **arguments
    )
    for row in range(4):
        alone = ours(
            PROMPTS[row // 2],
            prompt_2=second[row // 2],
            negative_prompt=negative[row // 2],
            image=paths[row // 2],
            seed=3 + row,
            **arguments,
        )
        assert error(alone.latents, made.latents[row : row + 1]) < 1e-5
    made.save(tmp_path / "made.png")
    again = calotype.replay(tmp_path / "made-3.png", image=paths)
    assert again.bit_equal


def test_conditioning_stands_for_the_prompt(dev):
    ours, _ = dev
    arguments = {"num_inference_steps": 1, "output_type": "latent", "seed": 4, **SIZE}
    encoded = ours.encode(calotype.Request(prompt=PROMPTS[0], max_sequence_length=9, num_inference_steps=1, **SIZE))
    told = encoded.conditioning
    whole = ours(PROMPTS[0], max_sequence_length=9, **arguments).latents
    assert torch.equal(whole, ours(conditioning=told, **arguments).latents)
    bare = dataclasses.replace(told.positive, pooled=None)
    for given, message in (
        ({"conditioning": bare}, "a pooled vector"),
        ({"conditioning": told, "max_sequence_length": 9}, "there is no prompt to read"),
        ({"conditioning": dataclasses.replace(told.positive, guidance=2.0)}, "it holds a guidance value"),
        ({"prompt": "a", "guidance": Distilled(None)}, "this model is told a value"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.stream(**given, **arguments)


def test_a_run_resumes_bit_equal(dev):
    ours, _ = dev
    arguments = {"num_inference_steps": 3, "max_sequence_length": 8, "seed": 1, **SIZE}
    encoded = ours.encode(calotype.Request(prompt=PROMPTS, **arguments))
    steps = list(ours.denoise(encoded))
    again = list(ours.denoise(encoded, resume=steps[0].state))
    assert torch.equal(again[-1].latents, steps[-1].latents)


def test_half_precision_keeps_wide_weights(dev):
    """float16: T5's output layers stay float32, and what overflows in a block is clipped as in the reference."""
    ours, _ = dev
    half = ours.to(dtype="float16")
    kinds = {name: parameter.dtype for name, parameter in half.encoders["t5"].model.named_parameters()}
    assert {kind for name, kind in kinds.items() if name.endswith(".wo.weight")} == {torch.float32}
    assert {kind for name, kind in kinds.items() if not name.endswith(".wo.weight")} == {torch.float16}
    assert half.to("cpu").encoders["t5"].model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype is torch.float32


def test_rows_are_alone(dev):
    ours, _ = dev
    arguments = {"num_inference_steps": 2, "max_sequence_length": 12, "output_type": "latent", **SIZE}
    together = ours(PROMPTS, seed=[7, 8], num_images_per_prompt=1, **arguments).latents
    for row, (prompt, seed) in enumerate(zip(PROMPTS, (7, 8), strict=True)):
        alone = ours(prompt, seed=seed, **arguments).latents
        assert error(alone, together[row : row + 1]) < 1e-5


def test_guidance_objects_keep_the_distilled_value(dev):
    ours, _ = dev
    arguments = {"num_inference_steps": 1, "max_sequence_length": 8, "output_type": "latent", "seed": 0, **SIZE}
    plain = ours(PROMPTS[0], **arguments).latents
    assert torch.equal(plain, ours(PROMPTS[0], guidance=Unguided(), **arguments).latents)
    assert torch.equal(plain, ours(PROMPTS[0], guidance=Distilled(3.5), **arguments).latents)
    assert not torch.equal(plain, ours(PROMPTS[0], guidance_scale=1.0, **arguments).latents)


def test_replay_keeps_the_arguments_of_the_family(dev, tmp_path):
    ours, _ = dev
    arguments = {"num_inference_steps": 2, "max_sequence_length": 9, "seed": 3, **SIZE}
    made = ours("a cat", prompt_2="the river", negative_prompt="two dogs", true_cfg_scale=2.0, **arguments)
    made.save(tmp_path / "cat.png")
    again = calotype.replay(tmp_path / "cat.png")
    assert again.bit_equal
    assert again.remarks == ()
    assert made.manifest.extra == {"max_sequence_length": 9, "prompt_2": ["the river"]}


def test_what_does_nothing_is_said(both):
    ours, _, is_dev = both
    arguments = {"num_inference_steps": 1, "max_sequence_length": 8, "output_type": "latent", **SIZE}
    warnings = ours("a cat", true_cfg_scale=3.0, guidance_scale=7.0, **arguments).warnings
    assert any("true_cfg_scale has no effect without a negative_prompt" in line for line in warnings)
    assert any("guidance_scale 7.0 has no effect" in line for line in warnings) != is_dev


def test_a_negative_prompt_needs_true_guidance(dev):
    ours, _ = dev
    result = ours("a cat", negative_prompt="a dog", num_inference_steps=1, output_type="latent", **SIZE)
    assert any(line.endswith("; true_cfg_scale over 1 asks for one") for line in result.warnings)


def test_a_denoiser_of_the_other_kind_brings_its_scheduler(tmp_path):
    kinds = {"dev": True, "schnell": False}
    for name, is_dev in kinds.items():
        flux_pipeline(is_dev, tmp_path / name)
    for folder, other in (("dev", "schnell"), ("schnell", "dev")):
        mixed = calotype.load(tmp_path / folder, denoiser=tmp_path / other / "transformer")
        assert mixed.family.scheduler == SCHEDULERS[kinds[other]]
        own = calotype.load(tmp_path / folder, denoiser=tmp_path / folder / "transformer")
        assert own.family.scheduler == calotype.load(tmp_path / folder).family.scheduler


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"height": 20}, "height is 20; it must be a multiple of 8, such as 16 or 24"),
        ({"guidance_rescale": 0.5}, "guidance_rescale: flux does not use this argument"),
        ({"max_sequence_length": 513}, "max_sequence_length is 513; it must be from 2 to 512"),
        ({"prompt_2": ["a", "b"]}, "2 texts in prompt_2 for 1 prompts"),
        ({"prompt_3": "a"}, "prompt_3: flux does not use this argument; it takes conditioning"),
        ({"true_cfg_scale": "2"}, "true_cfg_scale is '2'; it must be a finite number"),
    ],
)
def test_mistakes(dev, arguments, message):
    ours, _ = dev
    with pytest.raises(ValueError, match=message):
        ours("a cat", **{**SIZE, "num_inference_steps": 1, **arguments})


def test_folders_that_cannot_be_loaded(dev, tmp_path):
    _, theirs = dev
    folder = tmp_path / "broken"
    theirs.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "KandinskyPipeline"}))
    with pytest.raises(ValueError, match="a diffusers folder of KandinskyPipeline; supported today are"):
        calotype.load(folder)
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "text_encoder_2").rename(folder / "elsewhere")
    with pytest.raises(FileNotFoundError, match="no folder 'text_encoder_2'"):
        calotype.load(folder)
    (folder / "elsewhere").rename(folder / "text_encoder_2")
    weights = next((folder / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated"):
        calotype.load(folder)


def test_other_precision_leaves_the_pipeline_alone(dev):
    ours, _ = dev
    arguments = {"num_inference_steps": 1, "max_sequence_length": 8, "output_type": "latent", "seed": 1, **SIZE}
    before = ours("a cat", **arguments).latents
    half = ours.to(dtype="bfloat16")
    assert half("a cat", **arguments).latents.dtype is torch.float32
    assert torch.equal(before, ours("a cat", **arguments).latents)
    assert dataclasses.replace(half, recipe=ours.recipe).dtype is torch.bfloat16
