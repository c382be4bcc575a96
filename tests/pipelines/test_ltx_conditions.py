"""Pictures and clips at frames of LTX-Video's clips (0.9.5 and later), against diffusers' LTXConditionPipeline."""

import numpy
import pytest
import torch
from clip_pipelines import check_stages_compose_and_resume
from parity import error, generators
from PIL import Image

import calotype
from calotype import Condition
from calotype.cli import main
from calotype.denoisers.guidance import ClassifierFree
from calotype.pipelines.clips import read_clip
from calotype.pipelines.manifest import Manifest

from ..tiny_wan_pipeline import picture

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

PROMPTS = ["a photo of a red fox", "two old dogs on the grass and a cat"]
SMALL = {"height": 32, "width": 32}
WIDE = {"height": 32, "width": 64}
DECODED = {"decode_timestep": 0.06, "decode_noise_scale": 0.2}


@pytest.fixture(scope="module")
def ours(ltx):
    return ltx.both("later")[0]


def clip(count, size=(32, 32), seed=0):
    """Frames of a clip."""
    return [picture(*size, seed=seed + n) for n in range(count)]


def theirs_of(condition, rows):
    """A condition as diffusers has it, whose pictures or clips are one per row: what is one for all comes again."""
    from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition

    first = condition.shown[0] if isinstance(condition.shown, list) else None
    is_one = first is None if condition.video is None else not isinstance(first, list)
    each = [condition.shown] * rows if is_one else condition.shown
    where = {"frame_index": condition.frame_index, "strength": condition.strength}
    return LTXVideoCondition(**{"video" if condition.image is None else "image": each}, **where)


def reference(pipe, arguments):
    """Each step's packed latents and the clips [N, F, H, W, 3]."""
    steps = []

    def keep(pipe, index, time, values):
        steps.append(values["latents"].clone())
        return values

    return steps, pipe(**arguments, **DECODED, output_type="np", callback_on_step_end=keep).frames


def compare(both, told, theirs_alone, seeds=(5, 9)):
    """A run of each: latents of every step, also of frames that go ahead, and pixels."""
    ours, theirs = both
    found = list(ours.stream(**told, **DECODED, seed=[*seeds], output_type="np"))
    ours_alone = ("conditions", "video", "strength")
    common = {name: value for name, value in told.items() if name not in ours_alone}
    steps, clips = reference(theirs, {**common, **theirs_alone, "generator": generators(*seeds)})
    assert len(found) == len(steps)
    for step, packed in zip(found, steps, strict=True):
        latents, held = step.latents, step.state.latents
        expected = packed.unflatten(1, held.shape[2:]).movedim(-1, 1)
        assert error(held, expected) < 1e-5
        assert error(latents, expected[:, :, held.shape[2] - latents.shape[2] :]) < 1e-5
    result = ours.decode(found[-1])
    assert result.videos.shape == clips.shape
    assert numpy.abs(result.videos - clips).max() < 1e-4
    return result


CASES = {
    "a picture at the beginning": (17, SMALL, {}, [Condition(image=picture(30, 19))]),
    "a picture later": (17, WIDE, {"guidance_scale": 1.0}, [Condition(image=picture(64, 32), frame_index=11)]),
    "a clip at the beginning": (17, SMALL, {"guidance_scale": 1.0}, [Condition(video=clip(9), strength=0.03)]),
    "a clip later": (25, SMALL, {"image_cond_noise_scale": 0.0}, [Condition(video=clip(17), frame_index=8)]),
    "a weak clip later": (33, SMALL, {}, [Condition(video=clip(25), frame_index=8, strength=0.2)]),
    "two of unlike strengths": (
        *(17, WIDE, {"guidance_rescale": 0.4, "image_cond_noise_scale": 0.3, "frame_rate": 30}),
        [
            Condition(image=[picture(64, 32), picture(64, 32, seed=1)]),
            Condition(image=picture(64, 32, seed=2), frame_index=16, strength=0.4),
        ],
    ),
    "a clip between frames, and a weak picture": (
        *(17, SMALL, {"negative_prompt": ["a boat", ""]}),
        [
            Condition(video=[clip(9, seed=3), clip(9, seed=20)], frame_index=5, strength=0.8),
            Condition(image=picture(32, 32), strength=0.2),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_conditions(ltx, case):
    """Two prompts, each with noise of its own; pictures of another size are resized, with a warning."""
    frames, size, told, conditions = CASES[case]
    told = {"prompt": PROMPTS, "num_frames": frames, "num_inference_steps": 4, **size, **told, "conditions": conditions}
    theirs = {"conditions": [theirs_of(each, len(PROMPTS)) for each in conditions]}
    result = compare(ltx.both("later"), told, theirs)
    resized = "beginning" in case and "picture" in case
    assert result.warnings == (("conditions[0]: 30x19 is resized to 32x32",) if resized else ())
    assert result.manifest.task == ("video-to-video" if "clip" in case else "image-to-video")


def test_a_first_picture_is_a_condition(ltx):
    """The very same run, and that of diffusers."""
    told = {"prompt": PROMPTS[0], "num_frames": 9, "num_inference_steps": 3, **SMALL}
    begun = compare(ltx.both("later"), {**told, "image": picture(32, 32)}, {}, seeds=(5,))
    ours, _ = ltx.both("later")
    shown = ours(**told, **DECODED, seed=5, conditions=Condition(image=picture(32, 32)), output_type="np")
    assert torch.equal(shown.latents, begun.latents) and numpy.array_equal(shown.videos, begun.videos)
    assert (begun.manifest.task, [*begun.manifest.inputs]) == ("image-to-video", ["image"])
    assert begun.manifest.guidance["type"] == "ClassifierFree"


@pytest.mark.parametrize("conditions", [[], [Condition(image=picture(32, 32, seed=3), frame_index=7, strength=0.9)]])
def test_a_clip_to_start_from(ltx, conditions):
    """The last steps, from its latents with noise; diffusers takes the latents themselves."""
    ours, _ = ltx.both("later")
    video = torch.stack([torch.from_numpy(numpy.array(frame)).permute(2, 0, 1) / 255 for frame in clip(9)])
    latents = ours.vae.encode(video.transpose(0, 1)[None] * 2 - 1)
    told = {"prompt": PROMPTS[0], "num_frames": 9, "num_inference_steps": 5, **SMALL}
    mine = {"video": clip(9), "strength": 0.7, **({"conditions": conditions} if conditions else {})}
    theirs = {"latents": latents, "denoise_strength": 0.7}
    if conditions:
        theirs["conditions"] = [theirs_of(each, 1) for each in conditions]
    result = compare(ltx.both("later"), {**told, **mine}, theirs, seeds=(5,))
    assert result.manifest.strength == 0.7
    kept = ours(PROMPTS[0], video=clip(9), strength=0.0, seed=1, conditions=Condition(image=picture(32, 32)))
    assert error(kept.latents, latents) < 1e-5


def test_rows_are_alone(ours):
    """Conditions are one for all, one per prompt, or one per clip."""
    told = {"num_frames": 17, "num_inference_steps": 2, "output_type": "np", **SMALL}
    pictures, clips = [picture(20, 16, seed) for seed in range(4)], [clip(9, seed=4), clip(9, seed=7)]
    given = [(0, 0.8, pictures), (8, 1.0, clips), (3, 0.6, picture(32, 32))]
    kinds = ("image", "video", "image")

    def conditions(row):
        one = [pictures[row], clips[row // 2], given[2][2]]
        return [
            Condition(**{kind: shown}, frame_index=frame, strength=strength)
            for kind, shown, (frame, strength, _) in zip(kinds, one, given, strict=True)
        ]

    each = [
        Condition(**{kind: shown}, frame_index=frame, strength=strength)
        for kind, (frame, strength, shown) in zip(kinds, given, strict=True)
    ]
    together = ours(PROMPTS, num_videos_per_prompt=2, seed=4, conditions=each, **told)
    for row in range(4):
        alone = ours(PROMPTS[row // 2], seed=4 + row, conditions=conditions(row), **told)
        assert error(alone.latents, together.latents[row : row + 1]) < 1e-5
        assert numpy.abs(alone.videos[0] - together.videos[row]).max() < 1e-4


def test_a_condition_of_no_strength_is_none(ours):
    told = {"prompt": PROMPTS[0], "num_frames": 9, "num_inference_steps": 2, "seed": 3, "output_type": "np", **SMALL}
    without, weak = ours(**told), ours(**told, conditions=[Condition(image=picture(32, 32), strength=0)])
    assert torch.equal(weak.latents, without.latents) and numpy.array_equal(weak.videos, without.videos)


MANY = [
    Condition(image=picture(32, 32)),
    Condition(image=picture(32, 32, seed=1), frame_index=7, strength=0.02),
    Condition(image=picture(32, 32, seed=2), frame_index=8),
]
"""The second is made anew in the last steps alone."""


def test_stages_compose_and_resume(ours, tmp_path):
    told = {"prompt": PROMPTS, "num_frames": 9, "num_inference_steps": 3, "seed": 1, **SMALL, "conditions": MANY}
    whole, _ = check_stages_compose_and_resume(ours, told)
    encoded = ours.encode(calotype.Request(**told, output_type="np"))
    steps = list(ours.denoise(encoded))
    assert steps[0].latents.shape == encoded.shape == (2, 4, 2, 2, 2)
    for step in steps:
        file = calotype.save_state(step.state, tmp_path / "state.safetensors")
        rest = list(ours.denoise(encoded, resume=calotype.load_state(file)))
        assert torch.equal(rest[-1].latents, whole.latents)
    assert numpy.array_equal(ours.decode(steps[-1].latents, encoded).videos, whole.videos)
    frames = numpy.concatenate([*ours.stream_frames(**told, output_type="np")], axis=1)
    assert numpy.array_equal(frames, whole.videos)


@pytest.mark.parametrize("sampler", ["heun", "dpmpp_2m", "unipc", "euler_ancestral"])
def test_what_is_known_stays_as_it_is(ours, sampler):
    """Whatever the sampler does; of what is less sure, what a step expects is a whole picture."""
    told = {"prompt": PROMPTS[0], "num_frames": 9, "num_inference_steps": 3, "seed": 3, "sampler": sampler, **SMALL}
    told |= {"image_cond_noise_scale": 0.0, "conditions": MANY[:2]}
    encoded = ours.encode(calotype.Request(**told))
    begun = encoded.held.begun(torch.zeros(encoded.shape))
    steps = list(ours.denoise(encoded))
    assert error(steps[-1].latents[:, :, :1], begun[:, :, 1:2]) < 1e-6
    assert error(steps[0].state.latents[:, :, :1], begun[:, :, :1]) < 1e-6
    assert error(steps[-1].state.latents[:, :, :1], begun[:, :, :1]) > 1e-2
    again = list(ours.denoise(encoded, resume=steps[1].state))
    assert torch.equal(again[-1].latents, steps[-1].latents)


def test_initial_noise_and_guidance_that_are_given(ours):
    """Noise that is given is not drawn; passes one after the other are those of one batch."""
    told = {"prompt": PROMPTS[0], "num_frames": 9, "num_inference_steps": 2, "conditions": MANY, **SMALL}
    drawn = torch.randn(1, 4, 2, 2, 2, generator=torch.Generator().manual_seed(8))
    encoded = ours.encode(calotype.Request(**told, seed=3, latents=drawn, output_type="np"))
    step = list(ours.denoise(encoded))[-1]
    assert numpy.array_equal(ours.decode(step).videos, ours.decode(step.latents, encoded).videos)
    assert error(step.latents, ours(**told, seed=3).latents) > 1e-3
    both = [ours(**told, seed=3, guidance=ClassifierFree(2.5, batched=each)).latents for each in (True, False)]
    assert error(*both) < 1e-5


def test_a_clip_is_replayed_from_its_file(ours, ltx, tmp_path):
    """The file keeps digests of what was shown, where, and how strongly."""
    conditions = [Condition(video=clip(9, (40, 32)), strength=0.7), Condition(image=picture(32, 32), frame_index=12)]
    told = {"num_frames": 15, "num_inference_steps": 2, "seed": 3, "image_cond_noise_scale": 0.2, **SMALL}
    first = ours(PROMPTS[0], conditions=conditions, **told)
    (file,) = first.save(tmp_path / "clip.webp")
    manifest = Manifest.from_json(first.manifest.to_json())
    assert manifest.extra["conditions"] == [
        {"shows": "video", "frame_index": 0, "strength": 0.7},
        {"shows": "image", "frame_index": 12, "strength": 1.0},
    ]
    shown = [each.shown for each in conditions]
    again = calotype.replay(file, conditions=shown, pipeline=ours)
    assert again.bit_equal and not again.remarks
    assert calotype.replay(file, conditions=shown).bit_equal
    for wrong, message in (
        (None, "needs its conditions"),
        (shown[:1], "conditions holds 1 pictures and clips; that run was given 2"),
        ([shown[0], picture(32, 32, seed=9)], "not the conditions of that run"),
    ):
        with pytest.raises(ValueError, match=message):
            calotype.replay(file, conditions=wrong, pipeline=ours)


def test_files_and_the_command(ltx, tmp_path, capsys):
    """Pictures and clips in files, with their frames and strengths; replayed by the same files."""
    still, moving, out = tmp_path / "a.png", tmp_path / "b.webp", tmp_path / "cat.webp"
    picture(40, 32).save(still)
    clip(9)[0].save(moving, save_all=True, append_images=clip(9)[1:], lossless=True, duration=40)
    words = ["video", "a", "cat", "--model", str(ltx.folder("later")), "-o", str(out), "--frames", "17", "--steps", "1"]
    where = ["--condition", f"{moving}@8:0.6", "--condition", str(still)]
    assert main([*words, "--size", "32", "--seed", "3", *where]) == 0
    assert "conditions[1]: 40x32 is resized to 32x32" in capsys.readouterr().err
    conditions = [Condition(video=moving, frame_index=8, strength=0.6), Condition(image=Image.open(still))]
    told = {"num_frames": 17, "num_inference_steps": 1, "seed": 3, **SMALL, "conditions": conditions}
    wanted = ltx.both("later")[0]("a cat", **told).clips()[0]
    assert numpy.array_equal(read_clip(out).frames, wanted)
    assert main(["replay", str(out), "--condition", str(moving), "--condition", str(still)]) == 0
    assert "bit-equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image": picture(8, 8), "frame_index": -1}, "frame_index is -1; it must be a whole number from 0 on"),
        ({"image": picture(8, 8), "frame_index": 1.5}, "frame_index is 1.5; it must be a whole number"),
        ({"image": picture(8, 8), "strength": 1.2}, "strength is 1.2; it must be from 0 to 1"),
        ({"image": picture(8, 8), "video": clip(1)}, "both of image and video; it takes one"),
        ({}, "neither of image and video"),
    ],
)
def test_conditions_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        Condition(**arguments)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([Condition(image=picture(8, 8), frame_index=33)], r"conditions\[0\]: frame_index is 33; .* from 0 to 32"),
        ([Condition(video=clip(12))], r"\[0\]: video has 12 frames; it must have 1 or 8 more, such as 9 or 17"),
        ([Condition(video=clip(41))], "video has 41 frames from frame 0 on; the clip has 33, .* room for 33"),
        ([MANY[0], Condition(video=clip(17), frame_index=24)], r"conditions\[1\]: video has 17 frames from .* for 9"),
        ([Condition(video=clip(17), frame_index=12)], "of 17 frames begins at a multiple of 8, such as 8 or 16"),
        ([Condition(image=[picture(8, 8)] * 3)], r"conditions\[0\] holds 3 pictures for 1 prompts"),
        ([Condition(video=[clip(9), clip(17)])], r"conditions\[0\]: video holds clips of 9 and 17 frames"),
        ([Condition(image="nowhere.png")], "nowhere.png"),
        ([], "conditions is an empty list"),
        ([picture(8, 8)], r"conditions holds a Image; it takes calotype.Condition\(image="),
        ("a.png", "conditions holds a str"),
    ],
)
def test_conditions_that_do_not_fit(ours, monkeypatch, given, message):
    """Refused before anything is computed."""
    monkeypatch.setattr(type(ours.encoders["t5"]), "__call__", None)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        ours("a cat", conditions=given, num_frames=33, num_inference_steps=1, **SMALL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"conditions": MANY, "image": picture(8, 8)}, "image and conditions: image is a condition at frame 0"),
        ({"image_cond_noise_scale": 0.1}, "image_cond_noise_scale: .*give image or conditions"),
        ({"conditions": MANY, "image_cond_noise_scale": -1}, "image_cond_noise_scale is -1; it must be a number"),
        ({"image": picture(8, 8), "strength": 0.5}, "strength: it needs a video to start from"),
    ],
)
def test_arguments_that_do_not_go_together(ours, arguments, message):
    with pytest.raises(ValueError, match=message):
        ours("a cat", num_frames=9, num_inference_steps=1, **SMALL, **arguments)


def test_other_models_take_none(ltx):
    with pytest.raises(ValueError, match="conditions: ltx does not use this argument"):
        ltx.both("plain")[0]("a cat", conditions=MANY, num_inference_steps=1, num_frames=5, **SMALL)
    with pytest.raises(ValueError, match="conditions: plate does not use this argument"):
        calotype.load()("a cat", conditions=MANY, num_inference_steps=1)
