"""Qwen-Image from a diffusers folder: every stage is diffusers' own."""

import dataclasses

import numpy
import pytest
import torch
from parity import error, generators

import calotype
from calotype.denoisers.guidance import ClassifierFree, Distilled, TokenNorm, Unguided
from calotype.denoisers.patches import unpatchify

from ..tiny_qwen_image import qwen_image_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

PROMPTS = ["a photo of a red fox", "two old dogs on the grass and a cat"]
SIZE = {"height": 24, "width": 40}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Ours and theirs; 4 pixels a latent cell."""
    folder = tmp_path_factory.mktemp("qwen-image") / "model"
    theirs = qwen_image_pipeline(folder)
    return calotype.load(folder), theirs


@pytest.fixture(scope="module")
def ours(both):
    return both[0]


def converted(pipe, name):
    """Another of diffusers' pipelines over the same parts."""
    import diffusers

    other = getattr(diffusers, name).from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    return other


def reference(pipe, height, width, **arguments):
    """Each step's latents and the pictures [N, H, W, 3] of a diffusers pipeline."""
    steps = []

    def keep(_, index, time, values):
        packed = values["latents"]
        shape = (len(packed), packed.shape[-1] // 4, 1, height // 4, width // 4)
        steps.append(unpatchify(packed.clone(), shape, 2))
        return values

    arguments |= {"height": height, "width": width, "output_type": "np", "callback_on_step_end": keep}
    return steps, pipe(**arguments).images


def check_steps(found, steps):
    assert len(found) == len(steps)
    for step, expected in zip(found, steps, strict=True):
        assert error(step.latents, expected) < 1e-5


def pixels_apart(made, pictures):
    return numpy.abs(numpy.asarray(made.images) - pictures).max()


@pytest.mark.parametrize(
    ("size", "told"),
    [
        ((24, 40), {}),
        ((16, 16), {"negative_prompt": "a cat", "true_cfg_scale": 3.5}),
        ((24, 40), {"negative_prompt": ["a boat on the river", ""]}),
        ((24, 40), {"negative_prompt": "a cat", "true_cfg_scale": 1.0}),
    ],
)
def test_text_to_image(both, size, told):
    """4.0 is the scale where a negative prompt is given and none is said; up to 1 there is no guidance."""
    ours, theirs = both
    shared = {"prompt": PROMPTS, "num_inference_steps": 3, "height": size[0], "width": size[1]}
    other = dict(told)
    if isinstance(told.get("negative_prompt"), str):  # one for all is a shape error there
        other["negative_prompt"] = [told["negative_prompt"]] * 2
    steps, pictures = reference(theirs, **shared, **other, generator=generators(5, 9))
    found = list(ours.stream(**shared, **told, seed=[5, 9], output_type="np"))
    check_steps(found, steps)
    assert pixels_apart(ours.decode(found[-1]), pictures) < 1e-4


def test_conditioning_and_schedule(both):
    ours, theirs = both
    request = calotype.Request(prompt=PROMPTS, num_inference_steps=4, max_sequence_length=14, **SIZE)
    encoded = ours.encode(request)
    states, mask = theirs.encode_prompt(PROMPTS, max_sequence_length=14)
    positive = encoded.conditioning.positive
    assert mask is not None and positive.lengths.tolist() == mask.sum(1).tolist()
    assert error(positive.states, states) < 1e-5
    theirs(PROMPTS[0], num_inference_steps=4, output_type="latent", **SIZE)
    assert encoded.plan.schedule.sigmas == pytest.approx(theirs.scheduler.sigmas.tolist(), abs=1e-6)


def test_long_prompts_are_cut_and_told(ours):
    request = calotype.Request(prompt=["a cat", "a red fox " * 9], max_sequence_length=12, **SIZE)
    encoded = ours.encode(request)
    assert encoded.conditioning.positive.lengths.tolist()[1] == 12
    assert any("12 are read" in line for line in encoded.warnings)


@pytest.mark.parametrize("strength", [0.65, 1.0, 0.3])
def test_image_to_image(both, strength):
    """The picture is given once per row there: one for all would be drawn by the first row's generator alone."""
    ours, theirs = both
    picture = torch.rand(3, 24, 40, generator=torch.Generator().manual_seed(0))
    shared = {"prompt": PROMPTS, "strength": strength, "num_inference_steps": 4, "negative_prompt": ["a cat", "a"]}
    steps, pictures = reference(
        converted(theirs, "QwenImageImg2ImgPipeline"),
        **shared,
        **SIZE,
        image=torch.stack((picture, picture)),
        generator=generators(3, 4),
    )
    found = list(ours.stream(**shared, image=picture, seed=[3, 4], output_type="np"))
    check_steps(found, steps)
    assert pixels_apart(ours.decode(found[-1]), pictures) < 1e-4


def test_inpainting(both):
    """Latents as diffusers' for masks of whole cells; pixels outside are the picture's here, decoded ones there."""
    ours, theirs = both
    picture = torch.rand(3, 24, 40, generator=torch.Generator().manual_seed(4))
    mask = torch.zeros(1, 24, 40)
    mask[:, 8:16, 8:24] = 1
    shared = {"prompt": PROMPTS, "strength": 0.8, "num_inference_steps": 4, "true_cfg_scale": 2.5}
    shared["negative_prompt"] = ["a cat", ""]
    steps, pictures = reference(
        converted(theirs, "QwenImageInpaintPipeline"),
        **shared,
        **SIZE,
        image=torch.stack((picture, picture)),
        mask_image=torch.stack((mask, mask)),
        generator=generators(2, 6),
    )
    found = list(ours.stream(**shared, image=picture, mask_image=mask, seed=[2, 6], output_type="np"))
    check_steps(found, steps)
    made = numpy.asarray(ours.decode(found[-1]).images)
    inside = mask[0].bool().numpy()
    assert numpy.abs(made - pictures)[:, inside].max() < 1e-4
    assert numpy.abs(made[:, ~inside] - picture.permute(1, 2, 0).numpy()[~inside]).max() < 1e-6


def test_one_step_is_finite(both):
    """diffusers divides 0 by 0 when it stretches a schedule of one sigma to `shift_terminal`."""
    ours, theirs = both
    with pytest.warns(RuntimeWarning, match="invalid value"):
        theirs(PROMPTS[0], num_inference_steps=1, output_type="latent", **SIZE)
    assert theirs.scheduler.sigmas.isnan().any()
    (step,) = ours.stream(PROMPTS[0], num_inference_steps=1, seed=0, **SIZE)
    assert step.sigma == 0.0 and step.latents.isfinite().all()


def test_the_scale_has_two_names(ours):
    arguments = {"negative_prompt": "a cat", "num_inference_steps": 1, "output_type": "latent", "seed": 4, **SIZE}
    one = ours(PROMPTS[0], true_cfg_scale=3.0, **arguments).latents
    assert torch.equal(one, ours(PROMPTS[0], guidance_scale=3.0, **arguments).latents)
    plain = ours(PROMPTS[0], guidance=ClassifierFree(3.0, batched=False), **arguments).latents
    assert not torch.equal(one, plain)
    paired = ours(PROMPTS[0], guidance=ClassifierFree(3.0, renormalise=TokenNorm(2)), **arguments).latents
    assert error(paired, one) < 1e-5
    unguided = ours(PROMPTS[0], guidance=Unguided(), **arguments).latents
    assert torch.equal(unguided, ours(PROMPTS[0], true_cfg_scale=1, **arguments).latents)


def test_rows_are_alone(ours):
    arguments = {"num_inference_steps": 2, "output_type": "latent", **SIZE}
    negative = ["", "a boat and the river"]
    together = ours(PROMPTS, negative_prompt=negative, seed=[7, 8], **arguments).latents
    for row, (prompt, seed) in enumerate(zip(PROMPTS, (7, 8), strict=True)):
        alone = ours(prompt, negative_prompt=negative[row], seed=seed, **arguments).latents
        assert error(alone, together[row : row + 1]) < 1e-5


def test_a_run_resumes_bit_equal(ours):
    request = calotype.Request(prompt=PROMPTS, negative_prompt="a cat", num_inference_steps=3, seed=1, **SIZE)
    encoded = ours.encode(request)
    steps = list(ours.denoise(encoded))
    again = list(ours.denoise(encoded, resume=steps[0].state))
    assert torch.equal(again[-1].latents, steps[-1].latents)


def test_conditioning_stands_for_the_prompt(ours):
    arguments = {"num_inference_steps": 1, "output_type": "latent", "seed": 4, **SIZE}
    encoded = ours.encode(calotype.Request(prompt=PROMPTS[0], negative_prompt="a cat", **SIZE))
    told = encoded.conditioning
    whole = ours(PROMPTS[0], negative_prompt="a cat", **arguments).latents
    assert torch.equal(whole, ours(conditioning=told, **arguments).latents)
    looking = dataclasses.replace(told.positive, references=(torch.zeros(1, 4, 1, 4, 4),))
    with pytest.raises(ValueError, match="it holds references, and this model looks at no pictures"):
        ours(conditioning=looking, **arguments)


def test_replay(ours, tmp_path):
    arguments = {"num_inference_steps": 2, "max_sequence_length": 9, "seed": 3, **SIZE}
    made = ours("a cat", negative_prompt="two dogs", true_cfg_scale=2.0, **arguments)
    made.save(tmp_path / "cat.png")
    again = calotype.replay(tmp_path / "cat.png")
    assert again.bit_equal and again.remarks == ()
    assert made.manifest.extra == {"max_sequence_length": 9}
    assert made.manifest.guidance["renormalise"] == {"type": "TokenNorm", "patch": 2}


def test_what_does_nothing_is_said(ours):
    arguments = {"num_inference_steps": 1, "output_type": "latent", **SIZE}
    for given, message in (
        ({"true_cfg_scale": 3.0}, "true_cfg_scale has no effect without a negative_prompt"),
        ({"guidance_scale": 3.0}, "guidance_scale has no effect without a negative_prompt"),
        ({"guidance_scale": 0.5}, "give guidance=ClassifierFree"),
        ({"true_cfg_scale": 1.0, "negative_prompt": "a"}, "negative_prompt has no effect"),
    ):
        assert any(message in line for line in ours("a cat", **given, **arguments).warnings)
    assert ours("a cat", **arguments).warnings == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"height": 20}, "height is 20; it must be a multiple of 8, such as 16 or 24"),
        ({"guidance_scale": 2.0, "true_cfg_scale": 2.0}, "are the same for this model; give one of the two"),
        ({"guidance": Distilled(3.0)}, "this model is told no value"),
        ({"max_sequence_length": 1025}, "max_sequence_length is 1025; it must be from 2 to 1024"),
        ({"prompt_2": "a"}, "prompt_2: qwen-image does not use this argument"),
    ],
)
def test_mistakes(ours, arguments, message):
    with pytest.raises(ValueError, match=message):
        ours("a cat", **{**SIZE, "num_inference_steps": 1, **arguments})


def test_parts_that_do_not_fit_are_refused(both, tmp_path):
    from ..tiny_qwen_image import qwen_image_transformer

    _, theirs = both
    theirs.save_pretrained(tmp_path)
    qwen_image_transformer(joint_attention_dim=24).save_pretrained(tmp_path / "transformer")
    with pytest.raises(ValueError, match="has states of 32 channels; the transformer needs 24"):
        calotype.load(tmp_path)
