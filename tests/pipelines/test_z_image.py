"""Z-Image from a diffusers folder: every stage is diffusers' own."""

import json

import numpy
import pytest
import torch
from parity import error, generators
from tiny_z_image import BASE, TURBO, z_image_pipeline

import calotype
from calotype.denoisers.guidance import ClassifierFree, Distilled, NormLimit, Unguided

PROMPTS = ["a cat", " ".join(["two old dogs on the grass and a cat on the river of a red fox"] * 2)]
NEGATIVE = ["a photo of the river", ""]
SIZE = {"height": 24, "width": 40}
ARGUMENTS = {"num_inference_steps": 2, "output_type": "latent", **SIZE}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("z_image") / "base"
    theirs = z_image_pipeline(BASE, folder)
    return calotype.load(folder), theirs


@pytest.fixture(scope="module")
def turbo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("z_image") / "distilled"
    theirs = z_image_pipeline(TURBO, folder)
    return calotype.load(folder), theirs


def pictures(*seeds, size=(24, 40)):
    return torch.stack([torch.rand(3, *size, generator=generator) for generator in generators(*seeds)])


def reference(pipe, **arguments):
    """Each step's latents and the pictures [N, H, W, 3] of a diffusers pipeline, whose prompts are lists it changes."""
    steps = []

    def keep(_, index, time, values):
        steps.append(values["latents"].clone()[:, :, None])
        return {}

    copied = {name: list(value) if isinstance(value, list) else value for name, value in arguments.items()}
    made = pipe(**copied, output_type="np", callback_on_step_end=keep).images
    return steps, made


def check(ours, theirs, shared, *, seeds, mine=None, other=None):
    """Latents of every step within 1e-5; ours and their pictures."""
    steps, expected = reference(theirs, **shared, **(other or {}), generator=generators(*seeds))
    found = list(ours.stream(**shared, **(mine or {}), seed=list(seeds), output_type="np"))
    assert len(found) == len(steps)
    for step, latents in zip(found, steps, strict=True):
        assert error(step.latents, latents) < 1e-5
    return numpy.asarray(ours.decode(found[-1]).images), expected


def assert_same(made, expected):
    assert numpy.abs(made - expected).max() < 1e-4


@pytest.mark.parametrize("size", [(24, 40), (88, 16)])
def test_text_to_image(base, size):
    """Prompts of different lengths once they are filled up, and their negative ones."""
    ours, theirs = base
    height, width = size
    shared = {"prompt": PROMPTS, "negative_prompt": NEGATIVE, "num_inference_steps": 3, "guidance_scale": 2.3}
    assert_same(*check(ours, theirs, shared | {"height": height, "width": width}, seeds=(5, 9)))


def test_turbo_runs_without_guidance(turbo):
    ours, theirs = turbo
    shared = {"prompt": PROMPTS, "num_inference_steps": 4, "guidance_scale": 0.0, **SIZE}
    assert_same(*check(ours, theirs, shared, seeds=(1, 4)))
    steps = list(ours.stream(PROMPTS[0], seed=1, **SIZE))
    assert len(steps) == 8
    assert steps[0].encoded.plan.guidance == Unguided()
    expected, _ = reference(
        theirs, prompt=PROMPTS[:1], num_inference_steps=8, guidance_scale=0.0, **SIZE, generator=generators(1)
    )
    assert [step.sigma for step in steps][:-1] == pytest.approx(theirs.scheduler.sigmas[1:-1].tolist(), abs=1e-6)
    assert error(steps[3].latents, expected[3]) < 1e-5


def test_conditioning_and_schedule(base):
    ours, theirs = base
    request = calotype.Request(prompt=PROMPTS, negative_prompt="a boat", num_inference_steps=4, **SIZE)
    encoded = ours.encode(request)
    told = encoded.conditioning
    states, negative = theirs.encode_prompt(list(PROMPTS), negative_prompt=["a boat", "a boat"])
    for part, expected in ((told.positive, states), (told.negative, negative)):
        assert part.lengths.tolist() == [len(row) for row in expected]
        for row, length, want in zip(part.states, part.lengths, expected, strict=True):
            assert error(row[None, :length], want[None]) < 1e-5
    lengths = told.positive.lengths
    assert len({-(-int(length) // 32) for length in lengths}) == 2, "both prompts are filled up to one length"
    theirs(PROMPTS[0], num_inference_steps=4, guidance_scale=0.0, output_type="latent", **SIZE)
    assert encoded.plan.schedule.sigmas == pytest.approx(theirs.scheduler.sigmas.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        {"cfg_normalization": True},
        {"cfg_normalization": 0.6, "cfg_truncation": 0.3},
        {"cfg_truncation": 0.0},
        {"cfg_normalization": False, "cfg_truncation": 1.0},
    ],
)
def test_normalised_and_truncated_guidance(base, arguments):
    ours, theirs = base
    shared = {"prompt": PROMPTS, "negative_prompt": NEGATIVE, "num_inference_steps": 3, "guidance_scale": 3.5}
    check(ours, theirs, shared | arguments | SIZE, seeds=(2, 3))


@pytest.mark.parametrize("strength", [0.65, 1.0, 0.3])
def test_image_to_image(base, strength):
    """A picture for each row: one for all would be drawn by the first row's generator alone there."""
    from diffusers import ZImageImg2ImgPipeline

    ours, theirs = base
    theirs = ZImageImg2ImgPipeline.from_pipe(theirs)
    theirs.set_progress_bar_config(disable=True)
    shared = {"prompt": PROMPTS, "strength": strength, "num_inference_steps": 5, "guidance_scale": 1.5}
    shared |= {"negative_prompt": NEGATIVE, "image": pictures(0, 6)}
    assert_same(*check(ours, theirs, shared, seeds=(3, 4), other=SIZE))


@pytest.mark.parametrize("strength", [0.7, 1.0])
def test_inpainting(base, strength):
    """The same latents at every step; then pixels outside the mask are the input's here, where the reference has what
    the autoencoder makes of them."""
    from diffusers import ZImageInpaintPipeline

    ours, theirs = base
    theirs = ZImageInpaintPipeline.from_pipe(theirs)
    theirs.set_progress_bar_config(disable=True)
    inputs, mask = pictures(1, 2), torch.zeros(2, 1, 24, 40)
    mask[:, :, 8:16, 8:24] = 1
    shared = {"prompt": PROMPTS, "strength": strength, "num_inference_steps": 4, "guidance_scale": 1.5}
    shared |= {"image": inputs, "mask_image": mask}
    made, expected = check(ours, theirs, shared, seeds=(7, 8), other=SIZE)
    inside = mask[:, 0].bool().numpy()
    assert_same(made[inside], expected[inside])
    given = inputs.permute(0, 2, 3, 1).numpy()
    assert numpy.allclose(made[~inside], given[~inside], atol=1e-6)
    assert not numpy.allclose(expected[~inside], given[~inside], atol=1e-2)


def test_a_call_changes_no_arguments(base):
    """The reference changes the list of prompts, so that its second picture is another one."""
    ours, theirs = base
    prompts = [PROMPTS[0]]
    one, other = (ours(prompts, seed=1, **ARGUMENTS).latents for _ in range(2))
    assert prompts == [PROMPTS[0]]
    assert torch.equal(one, other)
    theirs(prompts, num_inference_steps=1, output_type="latent", **SIZE)
    assert prompts != [PROMPTS[0]]


def test_rows_are_alone(base):
    ours, _ = base
    together = ours(PROMPTS, negative_prompt=NEGATIVE, seed=[7, 8], **ARGUMENTS).latents
    for row, seed in enumerate((7, 8)):
        alone = ours(PROMPTS[row], negative_prompt=NEGATIVE[row], seed=seed, **ARGUMENTS).latents
        assert error(alone, together[row : row + 1]) < 1e-5


def test_guidance_scale_is_what_is_added(base):
    ours, _ = base
    plain = ours(PROMPTS, seed=0, guidance_scale=1.5, cfg_normalization=0.5, **ARGUMENTS).latents
    told = ClassifierFree(2.5, renormalise=NormLimit(0.5))
    assert torch.equal(plain, ours(PROMPTS, seed=0, guidance=told, **ARGUMENTS).latents)
    off = ours(PROMPTS, seed=0, guidance_scale=0, **ARGUMENTS).latents
    assert torch.equal(off, ours(PROMPTS, seed=0, guidance=ClassifierFree(1.0), **ARGUMENTS).latents)
    assert not torch.equal(off, plain)


def test_replay_keeps_guidance_and_length(base, tmp_path):
    ours, _ = base
    guided = {"guidance_scale": 2.0, "cfg_normalization": 0.8, "cfg_truncation": 0.5}
    made = ours(
        PROMPTS[1], negative_prompt="a boat", max_sequence_length=24, num_inference_steps=2, seed=3, **SIZE, **guided
    )
    assert any("24 are read" in line for line in made.warnings)
    made.save(tmp_path / "cat.png")
    again = calotype.replay(tmp_path / "cat.png")
    assert again.bit_equal
    assert again.remarks == ()


def test_what_a_model_was_not_made_for_is_said(base, turbo):
    arguments = {**ARGUMENTS, "num_inference_steps": 1}
    assert base[0]("a cat", guidance_scale=7.0, **arguments).warnings == ()
    (line,) = turbo[0]("a cat", guidance_scale=7.0, **arguments).warnings
    assert line.startswith("guidance_scale 7.0: this model (Turbo) was made to run without guidance")
    assert turbo[0]("a cat", cfg_truncation=0.5, **arguments).warnings == (
        "cfg_truncation has no effect without guidance",
    )
    assert base[0]("a cat", cfg_truncation=0.5, **arguments).warnings == ()


def test_half_precision(base):
    ours, _ = base
    half = ours.to(dtype="bfloat16")
    found = half(PROMPTS, seed=1, **ARGUMENTS).latents
    assert found.dtype is torch.float32
    assert error(found, ours(PROMPTS, seed=1, **ARGUMENTS).latents) < 0.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"height": 20}, "height is 20; it must be a multiple of 8, such as 16 or 24"),
        ({"height": 328}, "height is 328; it must be from 8 to 320"),
        ({"true_cfg_scale": 2.0}, "true_cfg_scale: z_image does not use this argument"),
        ({"max_sequence_length": 289}, "max_sequence_length is 289; it must be from 2 to 288"),
        ({"cfg_truncation": 1.5}, "cfg_truncation is 1.5; it must be from 0 to 1"),
        ({"cfg_normalization": -1}, "cfg_normalization is -1; it must be at least 0"),
        ({"cfg_normalization": "yes"}, "cfg_normalization is 'yes'; it must be a finite number"),
        ({"guidance": Unguided(), "cfg_truncation": 0.5}, "cfg_truncation: guidance, an object, already says it"),
        ({"guidance": Distilled(3.0)}, "this model is told no value"),
    ],
)
def test_mistakes(base, arguments, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        base[0]("a cat", **{**ARGUMENTS, **arguments})


def test_folders_that_cannot_be_loaded(base, tmp_path):
    _, theirs = base
    folder = tmp_path / "broken"
    theirs.save_pretrained(folder)
    file = folder / "transformer" / "config.json"
    entries = json.loads(file.read_text())
    file.write_text(json.dumps(entries | {"cap_feat_dim": 30}))
    with pytest.raises(ValueError, match="hidden_size 32; the transformer needs 30"):
        calotype.load(folder)
    file.write_text(json.dumps(entries | {"siglip_feat_dim": 16}))
    with pytest.raises(ValueError, match="siglip_feat_dim is 16"):
        calotype.load(folder)
    file.write_text(json.dumps(entries))
    weights = next((folder / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated"):
        calotype.load(folder)
