"""Stable Diffusion 3 from a diffusers folder: every stage is diffusers' own."""

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from parity import error, generators
from safetensors.torch import save_file

import calotype
from calotype.denoisers.guidance import ClassifierFree, Distilled, Unguided
from calotype.denoisers.sd3_config import SD3Config
from calotype.denoisers.skip_layers import SkipLayers
from calotype.pipelines.sd3 import recipe

from ..tiny_sd3 import KINDS, SIZES, in_original_layout, sd3_pipeline
from ..tiny_text_encoders import LONG

PROMPTS = ["a photo of a red fox", "two old dogs on the grass and a cat"]
SIZE = {"height": 24, "width": 40}


@pytest.fixture(scope="module")
def medium(tmp_path_factory):
    """Ours and theirs: second attentions, norms of queries and keys, T5."""
    folder = tmp_path_factory.mktemp("sd3") / "medium"
    theirs = sd3_pipeline("medium", folder)
    return calotype.load(folder), theirs


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Ours and theirs: neither of all that."""
    folder = tmp_path_factory.mktemp("sd3") / "plain"
    theirs = sd3_pipeline("3", folder, t5=False)
    return calotype.load(folder), theirs


def reference(pipe, **arguments):
    """Each step's latents and the pictures [N, H, W, 3] of a diffusers pipeline."""
    steps = []

    def keep(_, index, time, values):
        steps.append(values["latents"].clone()[:, :, None])
        return values

    pictures = pipe(**arguments, output_type="np", callback_on_step_end=keep).images
    return steps, pictures


def check(ours, theirs, mine, other):
    """Latents of every step within 1e-5, pixels within 1e-4."""
    steps, pictures = reference(theirs, **other)
    found = list(ours.stream(**mine))
    check_steps(found, steps)
    made = ours.decode(found[-1])
    assert numpy.abs(numpy.asarray(made.images) - pictures).max() < 1e-4


def check_steps(found, steps):
    assert len(found) == len(steps)
    for step, expected in zip(found, steps, strict=True):
        assert error(step.latents, expected) < 1e-5


def sibling(name, theirs):
    """Another pipeline of diffusers over the same parts."""
    import diffusers

    pipe = getattr(diffusers, name)(**{key: theirs.components[key] for key in theirs.components})
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("which", ["medium", "plain"])
def test_text_to_image(which, request):
    ours, theirs = request.getfixturevalue(which)
    shared = {"prompt": PROMPTS, "num_inference_steps": 3, "guidance_scale": 4.5, "max_sequence_length": 19, **SIZE}
    mine = {**shared, "seed": [5, 9], "output_type": "np"}
    check(ours, theirs, mine, {**shared, "generator": generators(5, 9)})


def test_conditioning_and_schedule(medium):
    """The scheduler's own steps, ends shifted twice; given sigmas are shifted once."""
    ours, theirs = medium
    request = calotype.Request(prompt=PROMPTS, prompt_2="a boat", num_inference_steps=4, clip_skip=1, **SIZE)
    encoded = ours.encode(request)
    states, negative, pooled, negative_pooled = theirs.encode_prompt(PROMPTS, ["a boat"] * 2, None, clip_skip=1)
    assert error(encoded.conditioning.positive.states, states) < 1e-5
    assert error(encoded.conditioning.positive.pooled, pooled) < 1e-5
    assert error(encoded.conditioning.negative.states, negative) < 1e-5
    assert error(encoded.conditioning.negative.pooled, negative_pooled) < 1e-5
    theirs.scheduler.set_timesteps(4)
    assert encoded.plan.schedule.sigmas == pytest.approx(theirs.scheduler.sigmas.tolist(), abs=1e-6)
    theirs.scheduler.set_timesteps(sigmas=[1.0, 0.5])
    given = ours.encode(calotype.Request(prompt="a", sigmas=[1.0, 0.5], **SIZE)).plan.schedule
    assert given.sigmas == pytest.approx(theirs.scheduler.sigmas.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    "others",
    [
        {"prompt_2": ["a boat", "the river"]},
        {"prompt_3": ["a boat", "the river"], "negative_prompt_3": "two dogs"},
        {"prompt_2": "a boat", "prompt_3": "the river", "negative_prompt_2": ["two dogs", "grass"]},
    ],
)
def test_negative_and_second_prompts(medium, others):
    """Each encoder with a text of its own, or with the prompt."""
    ours, theirs = medium
    both = {name: [text] * 2 if isinstance(text, str) else text for name, text in others.items()}
    shared = {
        "prompt": PROMPTS,
        "negative_prompt": ["a cat", "old"],
        "guidance_scale": 2.5,
        "num_inference_steps": 2,
        "max_sequence_length": 9,
        "clip_skip": 1,
        **SIZE,
    }
    mine = {**shared, **others, "seed": [1, 2], "output_type": "np"}
    check(ours, theirs, mine, {**shared, **both, "generator": generators(1, 2)})


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_guidance_begins_above_1(medium, scale):
    ours, theirs = medium
    shared = {"prompt": PROMPTS[0], "guidance_scale": scale, "num_inference_steps": 1, "max_sequence_length": 8, **SIZE}
    check(ours, theirs, {**shared, "seed": 1, "output_type": "np"}, {**shared, "generator": generators(1)})


def test_skipped_layers(medium):
    ours, theirs = medium
    shared = {"prompt": PROMPTS, "num_inference_steps": 4, "max_sequence_length": 8, "height": 24, "width": 24}
    skip = SkipLayers(layers=(0, 2), scale=1.7, start=0.1, stop=0.7, then=ClassifierFree(3.0))
    other = {
        "guidance_scale": 3.0,
        "skip_guidance_layers": [0, 2],
        "skip_layer_guidance_scale": 1.7,
        "skip_layer_guidance_start": 0.1,
        "skip_layer_guidance_stop": 0.7,
    }
    mine = {**shared, "guidance": skip, "seed": [1, 2], "output_type": "np"}
    check(ours, theirs, mine, {**shared, **other, "generator": generators(1, 2)})


@pytest.mark.parametrize("strength", [0.65, 1.0])
def test_image_to_image(medium, strength):
    """The picture is given once per row there: one for all would be drawn by the first row's generator alone."""
    ours, theirs = medium
    theirs = sibling("StableDiffusion3Img2ImgPipeline", theirs)
    picture = torch.rand(3, 24, 40, generator=torch.Generator().manual_seed(0))
    shared = {"prompt": PROMPTS, "strength": strength, "num_inference_steps": 4, "max_sequence_length": 8}
    shared["guidance_scale"] = 3.1
    mine = {**shared, "image": picture, "seed": [3, 4], "output_type": "np"}
    other = {**shared, "image": torch.stack((picture, picture)), "generator": generators(3, 4), **SIZE}
    check(ours, theirs, mine, other)


def test_inpainting(medium):
    """Latents are diffusers'. Its pictures are not: it forgets the autoencoder's shift, and repaints the outside."""
    ours, theirs = medium
    theirs = sibling("StableDiffusion3InpaintPipeline", theirs)
    picture = torch.rand(3, 24, 40, generator=torch.Generator().manual_seed(4))
    mask = torch.zeros(1, 24, 40)
    mask[:, 8:16, 8:24] = 1
    shared = {"prompt": PROMPTS, "strength": 0.7, "num_inference_steps": 4, "max_sequence_length": 8}
    shared["guidance_scale"] = 3.1
    other = {"image": torch.stack((picture, picture)), "mask_image": torch.stack((mask, mask)), **SIZE}
    steps, pictures = reference(theirs, **shared, **other, generator=generators(3, 4))
    found = list(ours.stream(**shared, image=picture, mask_image=mask, seed=[3, 4], output_type="np"))
    check_steps(found, steps)
    unshifted = theirs.vae.decode(found[-1].latents[:, :, 0] / theirs.vae.config.scaling_factor).sample
    assert numpy.abs(pictures - _levels(unshifted)).max() < 1e-4
    made = numpy.asarray(ours.decode(found[-1]).images)
    inside = (mask[0] == 1).numpy()
    whole = _levels(ours.vae.decode(found[-1].latents)[:, :, 0])
    assert numpy.abs(made[:, inside] - whole[:, inside]).max() < 1e-6
    outside = picture.permute(1, 2, 0).numpy()[~inside]
    assert numpy.abs(made[:, ~inside] - outside).max() < 1e-6


def _levels(pixels):
    return (pixels / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).detach().numpy()


def test_rows_are_alone(medium):
    ours, _ = medium
    arguments = {"num_inference_steps": 2, "max_sequence_length": 12, "output_type": "latent", **SIZE}
    together = ours(PROMPTS, seed=[7, 8], **arguments).latents
    for row, (prompt, seed) in enumerate(zip(PROMPTS, (7, 8), strict=True)):
        alone = ours(prompt, seed=seed, **arguments).latents
        assert error(alone, together[row : row + 1]) < 1e-5


def in_chunks(pipe):
    """The pipeline, whose CLIPs read prompts of any length."""
    clips = {role: replace(pipe.encoders[role], long_prompts="chunks") for role in ("clip", "clip_2")}
    return replace(pipe, encoders={**pipe.encoders, **clips})


def test_long_prompts_in_chunks(medium):
    """Both sides with as many chunks as they have, in one batch or in two passes."""
    ours, _ = medium
    whole = in_chunks(ours)
    arguments = {"num_inference_steps": 2, "output_type": "latent", "seed": 1, **SIZE}
    made = whole(LONG, negative_prompt="a cat", guidance_scale=3.0, **arguments)
    passes = whole(LONG, negative_prompt="a cat", guidance=ClassifierFree(3.0, batched=False), **arguments)
    assert not any("CLIP" in line for line in made.warnings)
    assert error(passes.latents, made.latents) < 1e-5
    assert error(ours(LONG, negative_prompt="a cat", guidance_scale=3.0, **arguments).latents, made.latents) > 1e-4
    skipping = SkipLayers(layers=(0,), start=0.0, stop=1.0, then=ClassifierFree(3.0))
    assert torch.isfinite(whole(LONG, guidance=skipping, **arguments).latents).all()


def test_prompts_of_one_call_may_differ_in_chunks(medium):
    """Each is that prompt alone, which is what diffusers makes of its states; so is a run from their conditioning."""
    ours, theirs = medium
    whole, prompts = in_chunks(ours), ["a cat", LONG, f"{LONG}, {LONG}"]
    arguments = {"num_inference_steps": 2, "max_sequence_length": 9, "guidance_scale": 3.0, **SIZE}
    arguments |= {"negative_prompt": ["", "a boat", f"{LONG} and {LONG}"], "output_type": "latent"}
    encoded = whole.encode(calotype.Request(prompt=prompts, seed=[5, 6, 7], **arguments))
    assert encoded.conditioning.positive.lengths.tolist() == [77 + 9, 2 * 77 + 9, 3 * 77 + 9]
    together = whole(prompts, seed=[5, 6, 7], **arguments).latents
    for row, seed in enumerate((5, 6, 7)):
        mine = {**arguments, "negative_prompt": arguments["negative_prompt"][row], "seed": seed}
        steps = list(whole.stream(prompts[row], **mine))
        assert error(together[row : row + 1], steps[-1].latents) < 1e-5
    shared = {"num_inference_steps": 2, "guidance_scale": 3.0, **SIZE}
    check_steps(
        steps, reference(theirs, **shared, **embeds(encoded.conditioning.rows([2])), generator=generators(7))[0]
    )
    again = whole(conditioning=encoded.conditioning, seed=[5, 6, 7], output_type="latent", **shared)
    assert torch.equal(again.latents, together)


def embeds(prompt):
    """What diffusers calls a prompt's conditioning."""
    sides = {"": prompt.positive, "negative_": prompt.negative}
    states = {f"{name}prompt_embeds": side.states for name, side in sides.items()}
    return states | {f"{name}pooled_prompt_embeds": side.pooled for name, side in sides.items()}


def test_encoders_that_read_texts_of_other_lengths(medium):
    """The one with fewer chunks goes on with those of an empty prompt."""
    ours, _ = medium
    whole = in_chunks(ours)
    clip, clip_2 = (whole.encoders[role] for role in ("clip", "clip_2"))
    told = whole.encode(calotype.Request(prompt=LONG, prompt_2="a cat", **SIZE)).conditioning.positive
    long, cat, empty = clip([LONG]).states, clip_2(["a cat"]).states, clip_2([""]).states
    width = long.shape[2] + cat.shape[2]
    expected = torch.cat((long, torch.cat((cat, empty), dim=1)), dim=2)
    assert torch.equal(told.states[:, : long.shape[1], :width], expected)
    assert told.lengths.tolist() == [told.states.shape[1]]


def test_a_model_without_t5_says_so(plain, medium):
    arguments = {"num_inference_steps": 1, "output_type": "latent", **SIZE}
    for ours, _ in (plain, medium):
        found = [line for line in ours("a cat", **arguments).warnings if "text_encoder_3" in line]
        assert len(found) == ("t5" not in ours.encoders)


def test_conditioning_stands_for_the_prompt(plain):
    ours, _ = plain
    arguments = {"num_inference_steps": 2, "guidance_scale": 3.0, "seed": 4, "output_type": "latent", **SIZE}
    request = calotype.Request(prompt=PROMPTS[0], **arguments)
    encoded = ours.encode(request)
    again = ours(conditioning=encoded.conditioning, **arguments).latents
    assert torch.equal(again, ours(PROMPTS[0], **arguments).latents)


def test_replay_keeps_the_arguments_of_the_family(medium, tmp_path):
    ours, _ = medium
    skip = SkipLayers(layers=(1,), stop=0.9)
    arguments = {"num_inference_steps": 3, "max_sequence_length": 9, "clip_skip": 1, "seed": 3, **SIZE}
    arguments |= {"prompt_2": "the river", "negative_prompt": "two dogs", "negative_prompt_3": "grass"}
    made = ours("a cat", guidance=skip, **arguments)
    made.save(tmp_path / "cat.png")
    again = calotype.replay(tmp_path / "cat.png")
    assert again.bit_equal
    texts = {"prompt_2": ["the river"], "negative_prompt_3": ["grass"]}
    assert made.manifest.extra == {"max_sequence_length": 9, "clip_skip": 1, **texts}


@pytest.mark.parametrize(
    ("kind", "distilled", "steps", "scale"),
    [("3", False, 28, 7.0), ("large", False, 28, 3.5), ("medium", False, 40, 4.5), ("large", True, 4, 0.0)],
)
def test_recipes(kind, distilled, steps, scale):
    config = SD3Config.from_entries(SIZES | KINDS[kind] | {"sample_size": 128, "pos_embed_max_size": 192})
    found = recipe(config, distilled=distilled)
    assert (found.num_inference_steps, found.guidance_scale) == (steps, scale)
    assert (found.width, found.height, found.max_size) == (1024, 1024, 3072)


def test_the_name_tells_turbo(tmp_path):
    folder = tmp_path / "stable-diffusion-3.5-large-turbo"
    sd3_pipeline("large", folder, t5=False)
    ours = calotype.load(folder)
    assert ours.recipe.num_inference_steps == 4
    arguments = {"num_inference_steps": 1, "output_type": "latent", "seed": 1, **SIZE}
    assert torch.equal(ours("a cat", **arguments).latents, ours("a cat", guidance=Unguided(), **arguments).latents)
    warnings = ours("a cat", guidance_scale=4.0, **arguments).warnings
    assert any("made to run without guidance" in line for line in warnings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"height": 20}, "height is 20; it must be a multiple of 8, such as 16 or 24"),
        ({"width": 96}, "width is 96; it must be from 8 to 88"),
        ({"true_cfg_scale": 2.0}, "true_cfg_scale: sd3 does not use this argument"),
        ({"max_sequence_length": 513}, "max_sequence_length is 513; it must be from 2 to 512"),
        ({"clip_skip": 5}, "clip_skip is 5; this text encoder can skip 0 to 2"),
        ({"clip_skip": 0.5}, "clip_skip is 0.5; it must be a whole number"),
        ({"prompt_2": ["a", "b"]}, "2 texts in prompt_2 for 1 prompts"),
        ({"prompt_3": "a"}, r"prompt_3: the model has no text_encoder_3 \(T5\) to read it"),
        ({"guidance": Distilled(3.5)}, "this model is told no value"),
        ({"guidance": SkipLayers(layers=(7,), stop=1.0), "num_inference_steps": 2}, "the model has blocks 0 to 2"),
    ],
)
def test_mistakes(plain, arguments, message):
    ours, _ = plain
    with pytest.raises(ValueError, match=message):
        ours("a cat", **{**SIZE, "num_inference_steps": 1, **arguments})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": (-1,)}, "they must be numbers of blocks"),
        ({"scale": float("nan")}, "it must be a finite number"),
        ({"stop": 1.5}, "each must be from 0 to 1"),
    ],
)
def test_skipping_that_makes_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        SkipLayers(**settings)


def test_no_skipping_is_plain_guidance(plain):
    ours, _ = plain
    arguments = {"num_inference_steps": 2, "output_type": "latent", "seed": 2, **SIZE}
    expected = ours("a cat", guidance=ClassifierFree(2.0), **arguments).latents
    for neutral in ({"layers": ()}, {"scale": 0.0}, {"stop": 0.0}):
        skip = SkipLayers(**{"layers": (1,), "stop": 1.0, "then": ClassifierFree(2.0), **neutral})
        assert torch.equal(ours("a cat", guidance=skip, **arguments).latents, expected)


def test_weights_may_stay_in_their_files(medium):
    ours, _ = medium
    arguments = {"num_inference_steps": 2, "max_sequence_length": 8, "output_type": "latent", "seed": 5, **SIZE}
    lean = calotype.load(ours.source.name, offload="blocks")
    assert all(parameter.is_meta for parameter in lean.denoiser.blocks.parameters())
    assert torch.equal(lean("a cat", **arguments).latents, ours("a cat", **arguments).latents)


def test_single_files(medium, tmp_path):
    """The denoiser in Stability AI's layout, the rest from a folder; T5 may be left out."""
    ours, theirs = medium
    file = tmp_path / "sd3.5_medium.safetensors"
    save_file(in_original_layout(theirs.transformer.state_dict(), ours.denoiser.config), file)
    folder, roles = Path(ours.source.name), {"clip": "text_encoder", "clip_2": "text_encoder_2"}
    arguments = {"num_inference_steps": 2, "max_sequence_length": 8, "output_type": "latent", "seed": 5, **SIZE}
    whole = calotype.load(file, encoders=folder, vae=folder)
    assert torch.equal(whole("a cat", **arguments).latents, ours("a cat", **arguments).latents)
    encoders = {role: folder / name for role, name in roles.items()}
    tokenizers = {"clip": folder / "tokenizer", "clip_2": folder / "tokenizer_2"}
    short = calotype.load(file, encoders=encoders, tokenizers=tokenizers, vae=folder)
    assert any("text_encoder_3" in line for line in short("a cat", **arguments).warnings)


def test_parts_that_do_not_fit(plain, tmp_path):
    _, theirs = plain
    folder = tmp_path / "model"
    theirs.save_pretrained(folder)
    config = folder / "text_encoder" / "config.json"
    config.write_text(config.read_text().replace('"projection_dim": 24', '"projection_dim": 28'))
    with pytest.raises(ValueError, match="projection_dim 48 in all; the transformer needs 44"):
        calotype.load(folder)
    (folder / "text_encoder_3").mkdir()
    with pytest.raises(FileNotFoundError, match="no folder 'tokenizer_3'"):
        calotype.load(folder)
