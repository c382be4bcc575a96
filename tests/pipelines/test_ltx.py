"""LTX-Video from diffusers folders: every stage is diffusers' own, from text and from a first picture."""

import copy
import dataclasses

import numpy
import pytest
import torch
from clip_pipelines import (
    check_any_number_of_frames,
    check_cancelling_decodes_nothing,
    check_exactly_the_frames_that_are_asked_for,
    check_stages_compose_and_resume,
    check_two_threads,
)
from parity import error, generators

import calotype
from calotype.denoisers.first_frames import FirstFramesKept
from calotype.denoisers.guidance import ClassifierFree, Distilled, Unguided
from calotype.pipelines.base import last
from calotype.pipelines.finite import NonFiniteError
from calotype.pipelines.manifest import Manifest
from calotype.pipelines.replay import Arguments

from ..tiny_wan_pipeline import picture

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

PROMPTS = ["a photo of a red fox", "two old dogs on the grass and a cat"]
SMALL = {"height": 32, "width": 32}
WIDE = {"height": 32, "width": 64}
TIMED = {"decode_timestep": 0.06, "decode_noise_scale": 0.2}


@pytest.fixture(scope="module")
def ours(ltx):
    return ltx.both("plain")[0]


def reference(pipe, arguments, shape):
    """Each step's latents and the clips [N, F, H, W, 3] of a diffusers pipeline."""
    steps = []

    def keep(pipe, index, time, values):
        steps.append(pipe._unpack_latents(values["latents"].clone(), *shape))
        return values

    return steps, pipe(**arguments, output_type="np", callback_on_step_end=keep).frames


def compare(both, generator, seeds, told, theirs_alone=None, *, known=0):
    """A run of each; the first `known` latent frames are compared in the end alone."""
    ours, theirs = both
    found = list(ours.stream(**told, seed=seeds, output_type="np"))
    other = {"decode_timestep": 0.05, "decode_noise_scale": 0.025, **told, **(theirs_alone or {})}
    steps, clips = reference(theirs, {**other, "generator": generator}, found[0].latents.shape[2:])
    assert len(found) == len(steps)
    for step, expected in zip(found, steps, strict=True):
        assert step.latents.shape[2] == known or error(step.latents[:, :, known:], expected[:, :, known:]) < 1e-5
    assert error(found[-1].latents, steps[-1]) < 1e-5
    result = ours.decode(found[-1])
    assert clips.shape[1] == other["num_frames"]
    clips = clips[:, : told["num_frames"]]
    assert result.videos.shape == clips.shape
    assert numpy.abs(result.videos - clips).max() < 1e-4
    return result


@pytest.mark.parametrize(
    ("kind", "frames", "size", "told"),
    [
        ("plain", 1, WIDE, {}),
        ("plain", 5, WIDE, {"negative_prompt": ["a cat", "a boat on the river"]}),
        ("plain", 9, SMALL, {"negative_prompt": ["a boat on the river", ""], "frame_rate": 30}),
        ("plain", 17, WIDE, {"guidance_scale": 4.5, "guidance_rescale": 0.7, "negative_prompt": ["a cat", "a cat"]}),
        ("plain", 9, WIDE, {"guidance_scale": 1.0}),
        ("timed", 1, SMALL, {}),
        ("timed", 9, WIDE, {"guidance_scale": 1.0, **TIMED}),
        ("timed", 17, SMALL, {"max_sequence_length": 10, "decode_timestep": 0.3}),
    ],
)
def test_text_to_video(ltx, kind, frames, size, told):
    """3.0 is the scale where none is said, with an empty negative prompt; up to 1 there is no guidance."""
    told = {"prompt": PROMPTS, "num_frames": frames, "num_inference_steps": 3, **size, **told}
    alone = {"decode_noise_scale": None} if "decode_timestep" in told and "decode_noise_scale" not in told else {}
    result = compare(ltx.both(kind), generators(5, 9), [5, 9], told, alone)
    assert result.fps == told.get("frame_rate", 25)
    assert result.warnings == ()
    assert (result.images is None) == (frames > 1)


@pytest.mark.parametrize(
    ("frames", "size", "told"),
    [
        (1, SMALL, {"num_inference_steps": 1}),
        (9, WIDE, {"guidance_rescale": 0.4, "frame_rate": 24, "num_inference_steps": 4, **TIMED}),
        (17, SMALL, {"guidance_scale": 1.0, "num_inference_steps": 5}),
    ],
)
def test_text_to_video_by_later_models(ltx, frames, size, told):
    """Whose first latent frame stands for one frame, and whose steps follow a rule of their own."""
    compare(ltx.both("later"), generators(5, 9), [5, 9], {"prompt": PROMPTS, "num_frames": frames, **size, **told})


def test_conditioning_and_schedule(ltx):
    ours, theirs = ltx.both("plain")
    encoded = ours.encode(calotype.Request(prompt=PROMPTS, num_inference_steps=4, num_frames=9, **SMALL))
    states, mask, negative, negative_mask = theirs.encode_prompt(PROMPTS, ["", ""])
    sides = (encoded.conditioning.positive, encoded.conditioning.negative)
    for side, expected, seen in zip(sides, (states, negative), (mask, negative_mask), strict=True):
        assert side.lengths.tolist() == seen.sum(1).tolist()
        assert error(side.states, expected * seen[..., None]) < 1e-5
    assert len(set(sides[0].lengths.tolist())) == 2
    for frames, size in ((9, SMALL), (1, SMALL), (17, WIDE)):
        told = {"num_inference_steps": 4, "num_frames": frames, **size}
        theirs(PROMPTS[0], output_type="latent", **told)
        points = ours.encode(calotype.Request(prompt="a cat", **told)).plan.schedule.points
        assert [point.sigma for point in points] == pytest.approx(theirs.scheduler.sigmas.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        (1, {}),
        (5, {"negative_prompt": ["", "a cat"]}),
        (9, {"negative_prompt": ["a boat", ""], "guidance_rescale": 0.8, "guidance_scale": 4.0}),
        (17, {"guidance_scale": 1.0}),
    ],
)
def test_image_to_video(ltx, frames, told):
    """Pictures of another size and aspect are resized, with a warning; the posterior is drawn first, row by row."""
    told = {"prompt": PROMPTS, "num_frames": frames, "num_inference_steps": 3, **WIDE, **told}
    told |= {"image": [picture(30, 19), picture(64, 32, seed=1)]}
    result = compare(ltx.from_picture("plain"), generators(5, 9), [5, 9], told, known=1)
    assert result.warnings == ("image: 30x19 is resized to 64x32",)
    assert result.manifest.task == "image-to-video"


def test_image_to_video_by_a_timed_decoder(ltx):
    """Its noise is drawn last, after the posterior's and the initial one."""
    told = {"prompt": PROMPTS[0], "num_frames": 9, "num_inference_steps": 2, "image": picture(32, 32), **SMALL, **TIMED}
    compare(ltx.from_picture("timed"), torch.Generator().manual_seed(5), 5, told, known=1)


@pytest.mark.parametrize("kind", ["timed", "later"])
def test_fewer_frames_than_a_group_has(ltx, kind):
    """Of groups of 8, where diffusers makes 1 of 5: the first of the 9 that it makes, from text and from a picture."""
    told = {"num_frames": 5, "num_inference_steps": 2, **WIDE, **TIMED}
    begun = {"prompt": PROMPTS[1], "image": picture(64, 32), **told}
    text, pictures = ltx.both(kind), ltx.both(kind) if kind == "later" else ltx.from_picture(kind)
    for result in (
        compare(text, generators(5, 9), [5, 9], {"prompt": PROMPTS, **told}, {"num_frames": 9}),
        compare(pictures, torch.Generator().manual_seed(5), 5, begun, {"num_frames": 9}, known=1),
    ):
        assert result.warnings == ("num_frames 5: the model makes 9, of which the first 5 are returned",)


def test_the_decoders_noise_follows_from_the_run(ltx):
    """A step, and its latents with their run, give the same clip; another seed's noise another one."""
    ours, _ = ltx.both("timed")
    told = {"prompt": PROMPTS[0], "num_frames": 9, "num_inference_steps": 2, "output_type": "np", **SMALL, **TIMED}
    whole = ours(**told, seed=3)
    encoded = ours.encode(calotype.Request(**told, seed=3))
    step = last(ours.denoise(encoded))
    assert numpy.array_equal(ours.decode(step).videos, whole.videos)
    assert numpy.array_equal(ours.decode(step.latents, encoded).videos, whole.videos)
    frames = numpy.concatenate([*ours.stream_frames(**told, seed=3)], axis=1)
    assert numpy.array_equal(frames, whole.videos)
    drawn = torch.randn(whole.latents.shape, generator=torch.Generator().manual_seed(8))
    given = ours(**told, seed=3, latents=drawn)
    expected = ltx.both("timed")[1](**told, generator=generators(3), latents=drawn.flatten(2).transpose(1, 2)).frames
    assert numpy.abs(given.videos - expected).max() < 1e-4
    alone = ours.decode(whole.latents)
    assert not numpy.array_equal(alone.clips()[0], whole.clips()[0])
    none = ours(**{**told, "decode_noise_scale": 0.0, "decode_timestep": 0.05}, seed=3)
    assert numpy.array_equal(alone.clips()[0], none.clips()[0])


def test_rows_are_alone(ltx):
    for kind, given in (("plain", {"image": [picture(20, 16, 1), picture(32, 18, 2)]}), ("timed", {})):
        ours, _ = ltx.both(kind)
        told = {"num_frames": 9, "num_inference_steps": 2, "output_type": "np", **SMALL}
        negative = ["", "a boat and the river"]
        together = ours(PROMPTS, negative_prompt=negative, num_videos_per_prompt=2, seed=4, **told, **given)
        for row in range(4):
            mine = {name: each[row // 2] for name, each in given.items()}
            alone = ours(PROMPTS[row // 2], negative_prompt=negative[row // 2], seed=4 + row, **told, **mine)
            assert error(alone.latents, together.latents[row : row + 1]) < 1e-5
            assert numpy.abs(alone.videos[0] - together.videos[row]).max() < 1e-4


def test_the_first_picture_is_kept_exactly(ours):
    """Whatever the sampler does, and at one step."""
    told = {"image": picture(32, 32), "num_frames": 5, "seed": 3, "output_type": "latent", **SMALL}
    first = ours("a cat", num_inference_steps=1, **told).latents[:, :, :1]
    for sampler in ("euler", "heun", "dpmpp_2m"):
        found = ours("a cat", num_inference_steps=3, sampler=sampler, **told).latents[:, :, :1]
        assert error(found, first) < 1e-5
    assert error(ours("a cat", num_inference_steps=1, **{**told, "seed": 4}).latents[:, :, :1], first) > 1e-3


def test_exactly_the_frames_that_are_asked_for(ltx):
    told = {"prompt": PROMPTS[0], "num_inference_steps": 1, "seed": 3, **SMALL}
    check_exactly_the_frames_that_are_asked_for(ltx.both("timed")[0], told, asked=11, made=17)


@pytest.mark.parametrize("frames", [1, 2, 3, 5, 7, 12, 40])
def test_any_number_of_frames(ours, frames):
    check_any_number_of_frames(ours, SMALL, frames)


def test_stages_compose_and_resume(ltx):
    told = {"prompt": PROMPTS, "num_frames": 9, "num_inference_steps": 3, "seed": 1, **SMALL}
    check_stages_compose_and_resume(ltx.both("timed")[0], told)


def test_cancelling_and_what_is_not_finite(ours, monkeypatch):
    told = {"num_frames": 5, "num_inference_steps": 3, "seed": 0, **SMALL}
    (step,) = ours.stream(PROMPTS[0], **{**told, "num_inference_steps": 1})
    assert step.sigma == 0.0 and step.latents.isfinite().all()
    check_cancelling_decodes_nothing(ours, {"prompt": PROMPTS[0], **told}, monkeypatch)
    broken = dataclasses.replace(ours, denoiser=copy.deepcopy(ours.denoiser))
    next(broken.denoiser.blocks[1].parameters()).data.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"block 1 of \d"):
        broken(PROMPTS[0], **told)


def test_two_threads_on_one_pipeline(ltx):
    calls = [{"prompt": PROMPTS[0], "seed": 1}, {"prompt": PROMPTS[1], "seed": 2, "num_frames": 11, **TIMED}]
    check_two_threads(ltx.both("timed")[0], {"num_frames": 9, "num_inference_steps": 2, **SMALL}, calls)


def test_guidance_of_clips_that_begin_with_a_picture(ours):
    told = {"prompt": "a cat", "num_frames": 5, **SMALL}
    for given, wanted in (
        ({}, ClassifierFree(3.0)),
        ({"guidance_scale": 1}, Unguided()),
        ({"guidance": ClassifierFree(0.5)}, ClassifierFree(0.5)),
    ):
        assert ours.encode(calotype.Request(**told, **given)).plan.guidance == wanted
        begun = ours.encode(calotype.Request(**told, **given, image=picture(32, 32)))
        assert begun.plan.guidance == FirstFramesKept(wanted)
    assert ours("a cat", guidance_scale=0.5, num_inference_steps=1, num_frames=1, **SMALL).warnings


def test_the_manifest_says_it_all(ltx):
    ours, _ = ltx.both("timed")
    told = {"num_frames": 3, "num_inference_steps": 2, "max_sequence_length": 9, "frame_rate": 12.5, **TIMED, **SMALL}
    image = picture(32, 32)
    first = ours(PROMPTS[0], negative_prompt="a cat", seed=3, guidance_rescale=0.3, image=image, **told)
    assert first.fps == 12.5
    manifest = Manifest.from_json(first.manifest.to_json())
    assert manifest.extra == {"num_frames": 3, "max_sequence_length": 9, "frame_rate": 12.5, **TIMED}
    assert (manifest.task, manifest.guidance["type"]) == ("image-to-video", "FirstFramesKept")
    again = Arguments.of(manifest, image=image, mask_image=None).run(ours, progress=False)
    assert torch.equal(again.latents, first.latents)
    assert all(numpy.array_equal(a, b) for a, b in zip(again.clips(), first.clips(), strict=True))


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("plain", {"height": 36}, "height is 36; it must be a multiple of 8, such as 32 or 40"),
        ("plain", {"num_frames": 0}, "num_frames is 0; it must be from 1 to 1000"),
        ("plain", {"decode_timestep": 0.1}, "decode_timestep: ltx does not use this argument"),
        ("plain", {"strength": 0.5, "image": picture(8, 8)}, "strength: ltx does not use this argument"),
        ("plain", {"last_image": picture(8, 8), "image": picture(8, 8)}, "last_image: ltx does not use this argument"),
        ("plain", {"frame_rate": 0}, "frame_rate is 0; it must be over 0"),
        ("plain", {"frame_rate": "fast"}, "frame_rate is 'fast'; it must be over 0"),
        ("timed", {"decode_timestep": 1.5}, "decode_timestep is 1.5; it must be from 0 to 1"),
        ("timed", {"decode_noise_scale": True}, "decode_noise_scale is True; it must be from 0 to 1"),
        ("plain", {"guidance": Distilled(3.0)}, "this model is told no value"),
        ("plain", {"max_sequence_length": 513}, "max_sequence_length is 513; it must be from 2 to 512"),
        ("plain", {"image": [picture(8, 8)] * 3}, "image holds 3 pictures for 1 prompts"),
    ],
)
def test_mistakes(ltx, kind, arguments, message):
    ours, _ = ltx.both(kind)
    with pytest.raises(ValueError, match=message):
        ours("a cat", **{**WIDE, "num_frames": 5, "num_inference_steps": 1, **arguments})


def test_conditioning_that_is_given_must_be_whole(ours):
    told = {"num_frames": 5, "num_inference_steps": 1, **SMALL}
    given = ours.encode(calotype.Request(prompt="a cat", **told)).conditioning
    with pytest.raises(ValueError, match="frame_rate: conditioning is given"):
        ours(conditioning=given, frame_rate=24, **told)
    bare = dataclasses.replace(given, positive=dataclasses.replace(given.positive, time_ids=None))
    with pytest.raises(ValueError, match="this model reads time_ids of 5 numbers"):
        ours(conditioning=bare, **told)
