"""Wan from diffusers folders: every stage is diffusers' own, from text and from pictures, with one and two experts."""

import copy
import dataclasses
import shutil
import sys
from types import SimpleNamespace
from unittest import mock

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
import calotype.pipelines.clips
import calotype.pipelines.inspection
from calotype.denoisers.experts import Experts, PerExpert
from calotype.denoisers.guidance import ClassifierFree, Distilled
from calotype.pipelines.finite import NonFiniteError
from calotype.pipelines.manifest import Manifest

from ..tiny_causal import change
from ..tiny_wan_pipeline import euler, picture, wan_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

PROMPTS = ["a photo of a red fox", "two old dogs on the grass &amp; a  cat"]
SMALL = {"height": 16, "width": 16}
WIDE = {"height": 16, "width": 32}


@pytest.fixture(scope="module")
def ours(wan):
    return wan.both("text")[0]


def reference(pipe, **arguments):
    """Each step's latents and the clips [N, F, H, W, 3] of a diffusers pipeline."""
    steps = []

    def keep(_, index, time, values):
        steps.append(values["latents"].clone())
        return values

    module, same = sys.modules[type(pipe).__module__], SimpleNamespace(fix_text=lambda text: text)
    with mock.patch.object(module, "ftfy", same, create=True):  # the one for pictures cannot do without
        return steps, pipe(**arguments, output_type="np", callback_on_step_end=keep).frames


def compare(both, seeds, arguments, theirs_alone=None, *, known=0):
    """A run of each; the first `known` latent frames are compared in the end alone."""
    ours, theirs = both
    steps, clips = reference(theirs, **{**arguments, **(theirs_alone or {})}, generator=generators(*seeds))
    found = list(ours.stream(**arguments, seed=list(seeds), output_type="np"))
    assert len(found) == len(steps)
    assert found[-1].latents.shape == steps[-1].shape
    for step, expected in zip(found, steps, strict=True):
        assert expected.shape[2] == known or error(step.latents[:, :, known:], expected[:, :, known:]) < 1e-5
    result = ours.decode(found[-1])
    assert result.videos.shape == clips.shape
    assert numpy.abs(result.videos - clips).max() < 1e-4
    return result


@pytest.mark.parametrize(
    ("frames", "size", "told"),
    [
        (1, WIDE, {}),
        (5, SMALL, {"negative_prompt": ["a boat on the river", ""]}),
        (9, WIDE, {"negative_prompt": ["a cat", "a cat"], "guidance_scale": 3.5}),
        (17, SMALL, {"guidance_scale": 1.0}),
    ],
)
def test_text_to_video(wan, frames, size, told):
    """5.0 is the scale where none is said, with an empty negative prompt; up to 1 there is no guidance."""
    told = {"prompt": PROMPTS, "num_frames": frames, "num_inference_steps": 3, **size, **told}
    other = {} if "negative_prompt" in told else {"negative_prompt": ["", ""]}  # it wants a list beside a list
    result = compare(wan.both("text"), (5, 9), told, other)
    assert result.fps == 16
    assert result.warnings == ()
    assert (result.images is None) == (frames > 1)


def test_conditioning_and_schedule(wan):
    ours, theirs = wan.both("text")
    encoded = ours.encode(calotype.Request(prompt=PROMPTS, num_inference_steps=4, num_frames=5, **SMALL))
    states, negative = theirs.encode_prompt(PROMPTS, ["", ""], max_sequence_length=512)
    for side, expected in ((encoded.conditioning.positive, states), (encoded.conditioning.negative, negative)):
        assert error(side.states, expected[:, : side.states.shape[1]]) < 1e-5
        assert not expected[:, side.states.shape[1] :].any()
    theirs(PROMPTS[0], num_inference_steps=4, num_frames=1, output_type="latent", **SMALL)
    points = encoded.plan.schedule.points
    assert [point.sigma for point in points] == pytest.approx(theirs.scheduler.sigmas.tolist(), abs=1e-6)
    assert [round(1000 * point.time) for point in points[:-1]] == theirs.scheduler.timesteps.tolist()


def test_the_other_scheduler(tmp_path):
    theirs = wan_pipeline(tmp_path / "model", scheduler=euler())
    told = {"prompt": PROMPTS[:1], "negative_prompt": [""], "num_frames": 5, "num_inference_steps": 3, **SMALL}
    compare((calotype.load(tmp_path / "model"), theirs), (4,), told)


def test_exactly_the_frames_that_are_asked_for(ours):
    told = {"prompt": PROMPTS[0], "num_inference_steps": 1, "seed": 3, **SMALL}
    whole, cut = check_exactly_the_frames_that_are_asked_for(ours, told, asked=7, made=9)
    assert torch.equal(cut.latents, whole.latents)
    assert cut.manifest.extra["num_frames"] == 7
    again = ours.decode(cut.latents)
    assert numpy.array_equal(again.clips()[0], whole.clips()[0])


def with_boundary(wan, kind, boundary, folder):
    """Ours and theirs, of a kind whose second expert's turn comes elsewhere."""
    made, theirs = wan.made(kind)
    shutil.copytree(made, folder)
    change(folder / "model_index.json", boundary_ratio=boundary)
    ours = calotype.load(folder)
    assert isinstance(ours.denoiser, Experts) and ours.denoiser.boundary == boundary
    return ours, of_the_same(type(theirs), theirs, boundary_ratio=boundary)


def of_the_same(kind, theirs, **changes):
    """Another pipeline of diffusers over the same parts."""
    other = kind.from_pipe(theirs, **changes)
    other.set_progress_bar_config(disable=True)
    return other


@pytest.mark.parametrize(
    ("boundary", "frames", "size"),
    [(0.0, 5, SMALL), (0.6, 5, SMALL), (0.9, 5, SMALL), (1.0, 5, SMALL), (0.8, 9, WIDE), (0.95, 17, SMALL)],
)
def test_two_experts(wan, tmp_path, boundary, frames, size):
    both = with_boundary(wan, "experts", boundary, tmp_path / "model")
    told = {"prompt": PROMPTS, "negative_prompt": ["a cat", ""], "num_frames": frames, "num_inference_steps": 4, **size}
    compare(both, (5, 9), {**told, "guidance_scale": 3.0, "guidance_scale_2": 4.5})


@pytest.mark.parametrize(
    ("boundary", "frames", "size", "pictures"),
    [(0.8, 5, SMALL, ["image"]), (0.95, 9, WIDE, ["image", "last_image"])],
)
def test_two_experts_begin_with_a_picture(wan, tmp_path, boundary, frames, size, pictures):
    both = with_boundary(wan, "beside", boundary, tmp_path / "model")
    told = {"prompt": PROMPTS, "negative_prompt": ["a cat", ""], "num_frames": frames, "num_inference_steps": 4, **size}
    given = {name: picture(size["width"], 16, seed) for seed, name in enumerate(pictures)}
    compare(both, (5, 9), {**told, **given, "guidance_scale": 3.0, "guidance_scale_2": 4.5})


def test_scales_of_two_experts(wan):
    ours, _ = wan.both("experts")
    told = {"prompt": PROMPTS[0], "num_frames": 1, "num_inference_steps": 1, "output_type": "latent", **SMALL}
    encoded = [
        ours.encode(calotype.Request(**told, guidance_scale=3.0, guidance_scale_2=second)) for second in (None, 3.0, 2)
    ]
    assert [each.plan.guidance for each in encoded[:2]] == [ClassifierFree(3.0, batched=False)] * 2
    assert isinstance(encoded[2].plan.guidance, PerExpert)
    off = ours(**told, guidance_scale=1.0, guidance_scale_2=4.0)
    assert any("guidance_scale_2 has no effect" in line for line in off.warnings)


@pytest.mark.parametrize(("frames", "size"), [(1, WIDE), (5, WIDE), (9, SMALL), (17, WIDE)])
def test_a_model_of_both_tasks(wan, frames, size):
    """TI2V-5B: its tokens have times of their own; 2 frames a group, 8 pixels a cell."""
    ours, theirs = wan.both("first")
    told = {"prompt": PROMPTS, "negative_prompt": ["a cat", ""], "num_frames": frames, "num_inference_steps": 3, **size}
    compare((ours, theirs), (5, 9), told)


@pytest.mark.parametrize(("frames", "size"), [(1, SMALL), (5, WIDE), (9, SMALL), (17, WIDE)])
def test_a_model_of_both_tasks_begins_with_a_picture(wan, frames, size):
    from diffusers import WanImageToVideoPipeline

    ours, theirs = wan.both("first")
    other = of_the_same(WanImageToVideoPipeline, theirs, expand_timesteps=True)
    told = {"prompt": PROMPTS, "negative_prompt": ["a cat", ""], "num_frames": frames, "num_inference_steps": 3, **size}
    result = compare((ours, other), (5, 9), {**told, "image": picture(size["width"], 16)}, known=1)
    assert result.warnings == ()
    assert result.manifest.task == "image-to-video"


@pytest.mark.parametrize(
    ("kind", "pictures", "frames", "size", "rows"),
    [
        ("beside", ["image"], 9, WIDE, 1),
        ("beside", ["image", "last_image"], 9, WIDE, 1),
        ("pictures", ["image"], 9, WIDE, 1),
        ("first and last", ["image", "last_image"], 9, WIDE, 1),
        ("beside", ["image"], 1, SMALL, 2),
        ("beside", ["image", "last_image"], 17, SMALL, 2),
        ("pictures", ["image"], 1, WIDE, 2),
        ("pictures", ["image"], 17, SMALL, 1),
        ("first and last", ["image", "last_image"], 5, SMALL, 2),
    ],
)
def test_image_to_video(wan, kind, pictures, frames, size, rows):
    """A picture of another size and aspect is resized, with a warning; the vision tower sees it as it was given."""
    given = {name: picture(30, 19, seed) for seed, name in enumerate(pictures)}
    told = {"negative_prompt": ["a cat", ""][:rows], "num_frames": frames, "num_inference_steps": 3, **size, **given}
    result = compare(wan.both(kind), (5, 9)[:rows], {"prompt": PROMPTS[:rows], **told})
    assert result.warnings == tuple(f"{name}: 30x19 is resized to {size['width']}x16" for name in pictures)


@pytest.mark.parametrize(
    ("strength", "frames", "size", "rows"),
    [(0.3, 5, SMALL, 1), (0.8, 5, SMALL, 1), (1.0, 5, SMALL, 1), (0.6, 9, WIDE, 2), (0.8, 1, WIDE, 1)],
)
def test_video_to_video(wan, strength, frames, size, rows):
    from diffusers import WanVideoToVideoPipeline

    ours, theirs = wan.both("text")
    other = WanVideoToVideoPipeline(
        **{name: theirs.components[name] for name in ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")}
    )
    other.set_progress_bar_config(disable=True)
    clips = [[picture(size["width"], 16, 20 * row + seed) for seed in range(frames)] for row in range(rows)]
    told = {"prompt": PROMPTS[:rows], "negative_prompt": ["a cat", ""][:rows], "num_inference_steps": 4}
    told |= {"strength": strength, "video": clips if rows > 1 else clips[0]}
    result = compare((ours, other), (5, 9)[:rows], told, size)
    assert result.manifest.task == "video-to-video"


def test_clips_to_start_from(wan, tmp_path):
    ours, _ = wan.both("text")
    told = {"num_inference_steps": 2, "seed": 3, "output_type": "np"}
    frames = numpy.random.default_rng(0).integers(0, 256, (7, 16, 24, 3), dtype=numpy.uint8)
    cut = ours("a cat", video=frames, **told)
    assert cut.videos.shape == (1, 7, 16, 24, 3)
    as_tensor = ours("a cat", video=torch.from_numpy(frames).movedim(-1, 1), **told)
    assert torch.equal(as_tensor.latents, cut.latents)
    calotype.pipelines.clips.save_clip(frames, tmp_path / "in.webp", fps=8)
    from_file = ours("a cat", video=tmp_path / "in.webp", **told)
    assert torch.equal(from_file.latents, cut.latents)
    assert from_file.manifest.inputs == cut.manifest.inputs
    two = ours(["a cat", "two dogs"], video=[frames, frames[::-1].copy()], **{**told, "seed": [3, 4]})
    assert error(two.latents[:1], cut.latents) < 1e-5
    trip = ours("a cat", video=frames[:5], strength=0, **told)
    pixels = torch.from_numpy(frames[:5]).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    assert torch.equal(trip.latents, ours.vae.encode(pixels))
    for given, message in (
        ({"video": frames, "num_frames": 9}, "num_frames is 9, but video has 7"),
        ({"video": frames, "width": 32}, "video is 24x16 and 32x16 was asked for"),
        ({"video": frames[:, :, :20]}, "video's width is 20; it must be a multiple of 8"),
        ({"video": [frames, frames[:3]]}, "video holds clips of 3 and 7 frames"),
        ({"video": [frames, frames[0]]}, "clips and frames of clips"),
        ({"strength": 0.5}, "strength: it needs"),
    ):
        with pytest.raises(ValueError, match=message):
            ours("a cat", **given, **told)


def test_each_prompt_has_its_picture(wan):
    ours, _ = wan.both("pictures")
    pictures = [picture(20, 16, 1), picture(32, 18, 2)]
    told = {"num_frames": 5, "num_inference_steps": 2, "output_type": "latent", **WIDE}
    together = ours(PROMPTS, image=pictures, num_videos_per_prompt=2, seed=4, **told).latents
    for row in range(4):
        alone = ours(PROMPTS[row // 2], image=pictures[row // 2], seed=4 + row, **told).latents
        assert error(alone, together[row : row + 1]) < 1e-5


def test_rows_are_alone(ours):
    told = {"num_frames": 5, "num_inference_steps": 2, "output_type": "latent", **SMALL}
    negative = ["", "a boat and the river"]
    together = ours(PROMPTS, negative_prompt=negative, seed=[7, 8], **told).latents
    for row, (prompt, seed) in enumerate(zip(PROMPTS, (7, 8), strict=True)):
        alone = ours(prompt, negative_prompt=negative[row], seed=seed, **told).latents
        assert error(alone, together[row : row + 1]) < 1e-5


def test_stages_compose_and_resume(wan):
    told = {"prompt": PROMPTS, "num_frames": 5, "num_inference_steps": 3, "seed": 1, **SMALL}
    for kind in ("text", "experts"):
        check_stages_compose_and_resume(wan.both(kind)[0], told)


def test_one_step_and_cancelling(ours, monkeypatch):
    told = {"prompt": PROMPTS[0], "num_frames": 1, "num_inference_steps": 1, "seed": 0, **SMALL}
    (step,) = ours.stream(**told)
    assert step.sigma == 0.0 and step.latents.isfinite().all()
    check_cancelling_decodes_nothing(ours, told, monkeypatch)


def test_an_expert_that_is_not_finite_is_named(wan):
    """The second one, whose turn comes in the second of two steps."""
    ours, _ = wan.both("experts")
    low = copy.deepcopy(ours.denoiser.low)
    next(low.blocks[1].parameters()).data.fill_(torch.nan)
    broken = dataclasses.replace(ours, denoiser=dataclasses.replace(ours.denoiser, low=low, boundary=0.8))
    with pytest.raises(NonFiniteError, match=r"block 1 of \d") as caught:
        broken(PROMPTS[0], num_frames=5, num_inference_steps=2, seed=1, **SMALL)
    assert (caught.value.step, caught.value.total) == (1, 2)


def test_two_threads_on_one_pipeline(wan):
    calls = [{"prompt": PROMPTS[0], "seed": 1}, {"prompt": PROMPTS[1], "seed": 2, "num_frames": 7}]
    check_two_threads(wan.both("experts")[0], {"num_frames": 5, "num_inference_steps": 2, **SMALL}, calls)


@pytest.mark.parametrize("frames", range(1, 41))
def test_any_number_of_frames(ours, frames):
    check_any_number_of_frames(ours, SMALL, frames)


def test_clips_by_output_type(ours):
    told = {"prompt": PROMPTS, "num_frames": 5, "num_inference_steps": 1, "seed": 2, **SMALL}
    by_type = {kind: ours(output_type=kind, **told) for kind in ("pil", "np", "pt", "latent")}
    assert by_type["pt"].videos.shape == (2, 5, 3, 16, 16)
    assert [len(clip) for clip in by_type["pil"].videos] == [5, 5]
    clips = [by_type[kind].clips() for kind in ("pil", "np", "pt")]
    assert all(numpy.array_equal(a, b) for each in clips[1:] for a, b in zip(clips[0], each, strict=True))
    assert clips[0][1].shape == (5, 16, 16, 3)
    assert by_type["latent"].videos is None
    with pytest.raises(ValueError, match="decodes no clips"):
        by_type["latent"].clips()
    with pytest.raises(ValueError, match="clips were made, not pictures"):
        by_type["pil"].pil()


def test_the_manifest_says_it_all(wan):
    ours, _ = wan.both("experts")
    told = {"num_frames": 3, "num_inference_steps": 2, "guidance_scale_2": 2.0, "max_sequence_length": 9, **SMALL}
    first = ours(PROMPTS[0], negative_prompt="a cat", seed=3, **told)
    manifest = Manifest.from_json(first.manifest.to_json())
    assert manifest.extra == {"num_frames": 3, "max_sequence_length": 9}
    assert (manifest.task, manifest.guidance["type"]) == ("text-to-video", "PerExpert")
    from calotype.pipelines.replay import Arguments

    again = Arguments.of(manifest, image=None, mask_image=None).run(ours, progress=False)
    assert torch.equal(again.latents, first.latents)


@pytest.mark.parametrize("kind", ["experts", "pictures"])
def test_weights_may_stay_in_their_files(wan, kind):
    ours, _ = wan.both(kind)
    given = {"image": picture(16, 16)} if kind == "pictures" else {}
    told = {"num_frames": 5, "num_inference_steps": 2, "seed": 3, "output_type": "latent", **SMALL, **given}
    expected = ours(PROMPTS[0], **told).latents
    for offload in ("encoders", "blocks"):
        lean = calotype.load(wan.made(kind)[0], offload=offload)
        assert torch.equal(lean(PROMPTS[0], **told).latents, expected)
    denoiser = lean.denoiser.low if kind == "experts" else lean.denoiser
    assert all(parameter.is_meta for parameter in denoiser.blocks.parameters())
    if kind == "pictures":
        assert all(parameter.is_meta for parameter in lean.looking.encoder.model.parameters())


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("text", {"height": 20}, "height is 20; it must be a multiple of 8, such as 16 or 24"),
        ("text", {"num_frames": 0}, "num_frames is 0; it must be from 1 to 1000"),
        ("text", {"num_frames": 4.5}, "num_frames is 4.5; it must be a whole number"),
        ("text", {"guidance_scale_2": 2.0}, "guidance_scale_2: wan does not use this argument"),
        ("text", {"image": picture(8, 8)}, "image: wan does not use this argument"),
        ("text", {"guidance": Distilled(3.0)}, "this model is told no value"),
        ("text", {"max_sequence_length": 513}, "max_sequence_length is 513; it must be from 2 to 512"),
        ("text", {"num_images_per_prompt": 2, "num_videos_per_prompt": 3}, "are the same; give one of the two"),
        ("pictures", {}, "image is not given; this model makes clips that begin with one"),
        ("pictures", {"last_image": picture(8, 8)}, "last_image: it needs an image to work on"),
        ("pictures", {"image": picture(8, 8), "last_image": picture(8, 8)}, "cannot end with one"),
        ("first and last", {"image": picture(8, 8)}, "last_image is not given"),
        ("beside", {"image": picture(8, 8), "last_image": picture(8, 8), "num_frames": 7}, "such as 5 or 9"),
        ("beside", {"image": picture(8, 8), "last_image": picture(8, 8), "num_frames": 1}, "must be at least 5"),
        ("beside", {"image": [picture(8, 8)] * 3}, "image holds 3 pictures for 1 prompts"),
        ("first", {"image": picture(8, 8), "last_image": picture(8, 8)}, "not end with one"),
        ("first", {"image": picture(8, 8), "strength": 0.5}, "image: a clip begins with it, or starts from a video"),
    ],
)
def test_mistakes(wan, kind, arguments, message):
    ours, _ = wan.both(kind)
    with pytest.raises(ValueError, match=message):
        ours("a cat", **{**WIDE, "num_frames": 5, "num_inference_steps": 1, **arguments})
