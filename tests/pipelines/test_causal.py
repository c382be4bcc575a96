"""Causal few-step video: chunks, their steps and frames, and what files say of it."""

import copy
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy
import pytest
import torch
from causal_reference import compare
from clip_pipelines import check_exactly_the_frames_that_are_asked_for
from fakes import fake_clip_pipeline, fake_pipeline
from parity import error
from peak_memory import Alive
from safetensors.torch import save_file

import calotype
from calotype import Chunks, Request
from calotype.core.weight_source import WeightSource
from calotype.denoisers.causal_wan import CausalWan
from calotype.denoisers.guidance import ClassifierFree
from calotype.denoisers.wan import WanDenoiser
from calotype.pipelines.base import Cancelled
from calotype.pipelines.finite import NonFiniteError
from calotype.pipelines.manifest import Manifest
from calotype.pipelines.replay import Arguments

from ..tiny_causal import causal_folder
from ..tiny_wan import in_original_layout
from ..tiny_wan_pipeline import picture, wan_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

PROMPTS = ["a photo of a red fox", "two old dogs on the grass &amp; a  cat"]
SMALL = {"height": 16, "width": 16}
ALONE = Chunks(frames=2, independent_first_frame=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Ours, diffusers' network, and the folder; 4 frames a group, 2 latent frames a chunk: 5, 13, 21 frames."""
    folder = tmp_path_factory.mktemp("causal") / "model"
    theirs = causal_folder(folder, num_frames_per_block=2)
    return SimpleNamespace(folder=folder, network=theirs.transformer, ours=calotype.load(folder))


@pytest.fixture(scope="module")
def ours(made):
    return made.ours


@pytest.mark.parametrize(
    "chunks", [None, ALONE, Chunks(frames=2, window=4), Chunks(frames=1, window=4, sink=2), Chunks(frames=3)]
)
@torch.no_grad()
def test_steps_are_those_that_are_written_out(made, ours, chunks):
    pipe = ours if chunks is None else calotype.causal(ours, chunks)
    request = Request(prompt=PROMPTS, num_frames=21, seed=[5, 9], **SMALL)
    compare(made.network, pipe, request, (5, 9), torch.zeros(2, 4, 0, 4, 4))


@torch.no_grad()
def test_a_clip_begins_with_a_picture(made, ours):
    pipe, first = calotype.causal(ours, ALONE), picture(16, 16)
    request = Request(prompt="a cat", num_frames=17, image=first, seed=5, **SMALL)
    pixels = torch.from_numpy(numpy.array(first)).permute(2, 0, 1)[None, :, None].float() / 127.5 - 1
    begin = pipe.vae.encode(pixels)
    last = compare(made.network, pipe, request, (5,), begin)
    assert error(last.latents[:, :, :1], begin) < 1e-6
    assert pipe("a cat", image=picture(30, 19), num_frames=9, seed=5, **SMALL).warnings == (
        "image: 30x19 is resized to 16x16",
    )


@pytest.mark.parametrize("output_type", ["pil", "np", "pt"])
def test_streamed_frames_are_the_whole(ours, output_type):
    told = {"prompt": PROMPTS, "num_frames": 11, "seed": 3, "output_type": output_type, **SMALL}
    whole, steps = ours(**told), list(ours.stream(**told))
    assert torch.equal(whole.latents, steps[-1].latents)
    assert whole.warnings == ("num_frames 11: the model makes 13, of which the first 11 are returned",)
    streamed = list(ours.stream_frames(**told))
    if output_type == "pil":
        for row, clip in enumerate(whole.videos):
            frames = [frame for group in streamed for frame in group[row]]
            assert len(frames) == 11
            assert all(a.tobytes() == b.tobytes() for a, b in zip(frames, clip, strict=True))
        return
    assert [group.shape[1] for group in streamed] == [1, 4, 4, 2]
    joined = torch.cat([torch.as_tensor(group) for group in streamed], dim=1)
    assert torch.equal(joined, torch.as_tensor(whole.videos))
    assert torch.equal(torch.as_tensor(ours.decode(steps[-1]).videos), joined)


def test_frames_come_before_the_next_chunk_is_begun(ours, monkeypatch):
    seen, slope = [], CausalWan.slope

    def counted(self, x, prepared, point):
        seen.append(point.index)
        return slope(self, x, prepared, point)

    monkeypatch.setattr(CausalWan, "slope", counted)
    counts = [len(seen) for _ in ours.stream_frames("a cat", num_frames=21, seed=3, **SMALL)]
    assert counts == [4, 4, 8, 8, 12, 12]
    seen.clear()
    frames = numpy.zeros((5, 16, 16, 3), dtype=numpy.uint8)
    counts = [len(seen) for _ in ours.stream_frames("a cat", num_frames=13, video=frames, seed=3)]
    assert counts == [0, 4, 4]


def test_a_step_decodes_to_the_clip_so_far(ours):
    steps = list(ours.stream("a cat", num_frames=13, seed=3, output_type="np", **SMALL))
    assert [step.latents.shape[2] for step in steps] == [2] * 4 + [4] * 4
    so_far, whole = ours.decode(steps[3]), ours.decode(steps[-1])
    assert so_far.videos.shape == (1, 5, 16, 16, 3)
    assert numpy.array_equal(so_far.videos, whole.videos[:, :5])


def test_a_longer_clip_begins_as_a_shorter_one(ours):
    told = {"prompt": "a cat", "seed": 3, "output_type": "latent", **SMALL}
    short, long = (ours(num_frames=count, **told).latents for count in (13, 21))
    assert torch.equal(long[:, :, :4], short)


def test_a_window_as_long_as_the_clip_changes_nothing(ours):
    told = {"prompt": PROMPTS, "num_frames": 21, "seed": 3, "output_type": "latent", **SMALL}
    expected = ours(**told).latents
    for window, equal in ((6, True), (50, True), (4, False)):
        pipe = calotype.causal(ours, Chunks(frames=2, window=window))
        assert torch.equal(pipe(**told).latents, expected) is equal


def test_cancelling_decodes_nothing(ours, monkeypatch):
    told = {"num_frames": 13, "seed": 0, **SMALL}
    cancel = threading.Event()
    frames = ours.stream_frames("a cat", cancel=cancel, **told)
    next(frames)
    cancel.set()
    with pytest.raises(Cancelled, match="after step 4 of 8"):
        next(frames)
    monkeypatch.setattr(type(ours.vae), "stream_stretches", None)
    cancel = threading.Event()
    with pytest.raises(Cancelled, match="after step 5 of 8") as caught:
        ours("a cat", cancel=cancel, on_step=lambda step: step.chunk == 1 and cancel.set(), **told)
    assert caught.value.step.chunk == 1


def test_rows_are_alone(ours):
    told = {"num_frames": 13, "output_type": "latent", **SMALL}
    together = ours(PROMPTS, seed=[7, 8], num_videos_per_prompt=1, **told)
    assert together.seeds == (7, 8)
    for row, prompt in enumerate(PROMPTS):
        alone = ours(prompt, seed=7 + row, **told).latents
        assert error(alone, together.latents[row : row + 1]) < 1e-5


def test_precomputed_conditioning_and_given_noise(ours):
    told = {"num_frames": 13, "seed": 1, "output_type": "latent", **SMALL}
    encoded = ours.encode(Request(prompt=PROMPTS, **told))
    expected = ours(PROMPTS, **told).latents
    assert torch.equal(ours(conditioning=encoded.conditioning, **told).latents, expected)
    noise = torch.randn(1, 4, 4, 4, 4)
    first, second = (ours("a cat", latents=noise, **{**told, "seed": seed}).latents for seed in (1, 1))
    assert torch.equal(first, second)
    assert not torch.equal(ours("a cat", latents=noise.flip(2), **told).latents, first)


@pytest.mark.parametrize("frames", [1, 2, 5, 6, 13, 14, 20, 28, 37, 38, 40])
def test_any_number_of_frames(ours, frames):
    result = ours("a cat", num_frames=frames, num_inference_steps=1, seed=1, output_type="np", **SMALL)
    assert result.videos.shape == (1, frames, 16, 16, 3)
    assert result.warnings[-1] == "num_inference_steps 1: this model was made for 4"
    assert len(result.warnings) == 1 + (frames % 8 != 5)


@pytest.mark.parametrize(
    ("chunks", "asked", "whole"), [(Chunks(frames=2), 30, 37), (ALONE, 10, 17), (Chunks(frames=3, window=6), 40, 45)]
)
def test_exactly_the_frames_that_are_asked_for(ours, chunks, asked, whole):
    told = {"prompt": "a cat", "seed": 3, **SMALL}
    check_exactly_the_frames_that_are_asked_for(calotype.causal(ours, chunks), told, asked=asked, made=whole)


def test_memory_of_streamed_frames_is_flat_over_40_chunks(ours):
    """But for the latents of the clip so far: a step's, its denoised ones, and those that the next chunk goes on from.
    Frames are let go as they come."""
    pipe = calotype.causal(ours, Chunks(frames=2, window=5, sink=1))
    conditioning = pipe.encode(Request(prompt="a cat", num_frames=5, **SMALL)).conditioning
    told = {"conditioning": conditioning, "num_inference_steps": 2, "seed": 3, "output_type": "pt", **SMALL}
    peaks, latents = [], []
    for count in (8, 40):
        num_frames = 8 * count - 3
        with Alive() as alive:
            frames = pipe.stream_frames(num_frames=num_frames, **told)
            left = num_frames - next(frames).shape[1]
            alive.peak = 0  # what takes more once, before the first frame, would hide what grows
            for group in frames:
                left -= group.shape[1]
                del group
        assert left == 0
        peaks.append(alive.peak)
        latents.append(torch.zeros(1, 4, 2 * count, 4, 4).nbytes)
    assert peaks[1] - peaks[0] <= 3 * (latents[1] - latents[0])


def test_a_block_that_is_not_finite_is_named(ours):
    """The second chunk's, whose first chunk was remembered whole."""
    original = CausalWan.slope

    class Broken(CausalWan):
        def slope(self, x, prepared, point):
            if prepared.memory.num_frames and point.sigma < 0.9:
                next(self.network.blocks[1].parameters()).data.fill_(torch.nan)
            return original(self, x, prepared, point)

    broken = dataclasses.replace(
        ours, denoiser=Broken(network=copy.deepcopy(ours.denoiser.network), chunks=ours.denoiser.chunks)
    )
    with pytest.raises(NonFiniteError, match=r"block 1 of 2") as caught:
        broken(PROMPTS[0], num_frames=13, seed=1, **SMALL)
    assert (caught.value.step, caught.value.total) == (6, 8)


def test_two_threads_on_one_pipeline(ours):
    calls = [{"prompt": PROMPTS[0], "seed": 1, "num_frames": 13}, {"prompt": PROMPTS[1], "seed": 2, "num_frames": 5}]
    told = {"output_type": "np", "progress": False, **SMALL}
    expected = [ours(**told, **call).videos for call in calls]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda call: ours(**told, **call).videos, calls))
    assert all(numpy.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_manifest_makes_it_again(ours):
    frames = numpy.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=numpy.uint8)
    first = ours("a cat", num_frames=12, video=frames, seed=3, max_sequence_length=9)
    manifest = Manifest.from_json(first.manifest.to_json())
    assert manifest.sampler == {"type": "LCM", "timestep_scaling": None}
    assert manifest.extra == {"num_frames": 12, "max_sequence_length": 9}
    arguments = Arguments.of(manifest, image=None, mask_image=None, video=frames)
    assert torch.equal(arguments.run(ours, progress=False).latents, first.latents)


def test_replay_knows_the_chunks(wan, ours, tmp_path):
    """They are made anew for a model that is loaded with others, and refused where a pipeline is given."""
    pipe = calotype.causal(ours, Chunks(frames=1, window=3, sink=1))
    pipe("a cat", num_frames=9, seed=3, **SMALL).save(tmp_path / "a.webp")
    again = calotype.replay(tmp_path / "a.webp")
    assert again.bit_equal
    assert again.manifest.chunks == {
        "type": "Chunks",
        "frames": 1,
        "independent_first_frame": False,
        "window": 3,
        "sink": 1,
    }
    assert calotype.replay(tmp_path / "a.webp", pipeline=pipe).bit_equal
    plain = wan.both("text")[0]
    for other, found in ((ours, r"Chunks\(frames=2, .*\)"), (plain, "whole clips")):
        with pytest.raises(ValueError, match=rf"made by Chunks\(frames=1, .*\), the pipeline makes {found}; calotype"):
            calotype.replay(tmp_path / "a.webp", pipeline=other)
    plain("a cat", num_frames=5, num_inference_steps=1, seed=3, **SMALL).save(tmp_path / "b.webp")
    assert calotype.replay(tmp_path / "b.webp", pipeline=plain).manifest.chunks is None


def test_a_folder_is_told_by_its_classes(made, ours, tmp_path):
    assert ours.denoiser.chunks == Chunks(frames=2)
    assert (ours.recipe.num_inference_steps, ours.recipe.num_frames, ours.looking) == (4, 81, None)
    told = {"num_frames": 13, "seed": 3, "output_type": "latent", **SMALL}
    ours.save(tmp_path / "saved")
    again = calotype.load(tmp_path / "saved")
    assert (again.family, again.recipe, again.denoiser.config) == (ours.family, ours.recipe, ours.denoiser.config)
    assert torch.equal(again("a cat", **told).latents, ours("a cat", **told).latents)
    lean = calotype.load(made.folder, offload="blocks")
    assert torch.equal(lean("a cat", **told).latents, ours("a cat", **told).latents)
    half = ours.to(dtype="bfloat16")
    assert half.denoiser.network.image_in.weight.dtype is torch.bfloat16
    assert half("a cat", **told).latents.isfinite().all()


def test_a_file_is_told_by_its_name(tmp_path):
    """Also in a folder with another scheduler; what is saved of it is told by its config."""
    theirs = wan_pipeline(tmp_path / "model", num_attention_heads=1, attention_head_dim=128, eps=1e-6)
    weights, told = in_original_layout(theirs.transformer.state_dict()), {"num_frames": 9, "seed": 1, **SMALL}
    for name, kind in (("Self-Forcing-DMD-1.3B.safetensors", CausalWan), ("wan.safetensors", WanDenoiser)):
        save_file(weights, tmp_path / name)
        pipe = calotype.load(tmp_path / "model", denoiser=tmp_path / name)
        assert isinstance(pipe.denoiser, kind)
        if kind is CausalWan:
            assert (pipe.denoiser.chunks, pipe.family.scheduler.shift) == (Chunks(), 5.0)
            pipe.save(tmp_path / "saved")
            again = calotype.load(tmp_path / "saved")
            assert torch.equal(again("a cat", **told).latents, pipe("a cat", **told).latents)


def test_wan_becomes_causal(wan, tmp_path):
    """The weights are shared; the folder that is saved says what was chosen."""
    plain, _ = wan.both("text")
    pipe = calotype.causal(plain, Chunks(frames=2, window=4, sink=1), shift=4.0)
    assert pipe.denoiser.network is plain.denoiser
    told = {"num_frames": 13, "seed": 3, "output_type": "latent", **SMALL}
    pipe.save(tmp_path / "saved")
    again = calotype.load(tmp_path / "saved")
    assert (again.family, again.denoiser.config) == (pipe.family, pipe.denoiser.config)
    assert torch.equal(again("a cat", **told).latents, pipe("a cat", **told).latents)
    assert calotype.causal(again).family.scheduler.shift == 4.0
    for kind, message in (
        ("experts", "has a Experts; clips are made chunk by chunk by"),
        ("pictures", "reads pictures"),
    ):
        with pytest.raises(ValueError, match=message):
            calotype.causal(wan.both(kind)[0])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("experts", r"model has two experts \(its boundary_ratio is 0.6\); clips are made chunk by chunk by one"),
        ("pictures", "model: this denoiser reads pictures beside its latents"),
    ],
)
def test_folders_that_cannot_be_causal_are_refused_at_once(kind, message, tmp_path, monkeypatch):
    """No weights are looked for."""
    causal_folder(tmp_path / "model", kind)
    monkeypatch.setattr(WeightSource, "for_module", None)
    with pytest.raises(ValueError, match=message):
        calotype.load(tmp_path / "model")


def test_frames_of_other_models_stream_too(wan):
    ours, _ = wan.both("text")
    told = {"num_frames": 7, "num_inference_steps": 2, "seed": 3, "output_type": "np", **SMALL}
    whole = ours("a cat", **told)
    assert numpy.array_equal(numpy.concatenate(list(ours.stream_frames("a cat", **told)), axis=1), whole.videos)
    clip = fake_clip_pipeline()
    (frames,) = clip.stream_frames("a cat", seed=1, output_type="np")
    assert numpy.array_equal(frames, clip("a cat", seed=1, output_type="np").videos)
    with pytest.raises(ValueError, match="makes pictures, not clips"):
        fake_pipeline().stream_frames("a cat")
    with pytest.raises(ValueError, match="output_type is 'latent', which decodes no frames"):
        ours.stream_frames("a cat", output_type="latent")


VIDEO = numpy.zeros((5, 16, 16, 3), dtype=numpy.uint8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"guidance_scale": 3.0}, "guidance_scale is 3.0; this model runs without guidance"),
        ({"guidance": ClassifierFree(2.0)}, "this model runs without guidance"),
        ({"schedule": calotype.flow_schedule(4).between(0, 2)}, "schedule ends at sigma 0.5; chunks must be finished"),
        ({"image": picture(8, 8)}, "image: wan does not use this argument"),
        ({"video": VIDEO, "strength": 0.5}, "strength: wan does not use this argument"),
        ({"video": VIDEO, "num_frames": 5}, "num_frames is 5, with the 5 of video; it must be more than 5"),
        ({"video": VIDEO, "width": 32}, "video is 16x16 and 32x16 was asked for"),
        ({"num_frames": 0}, "num_frames is 0; it must be from 1 to 1000"),
        ({"latents": torch.zeros(1, 4, 3, 4, 4)}, r"latents have shape \(1, 4, 3, 4, 4\); this request needs"),
    ],
)
def test_mistakes(ours, arguments, message):
    size = {} if "video" in arguments and "width" not in arguments else SMALL
    size = {name: value for name, value in size.items() if name not in arguments}
    with pytest.raises(ValueError, match=message):
        ours("a cat", **{"num_frames": 9, "seed": 1, **size, **arguments})


def test_a_picture_alone_is_no_clip(ours):
    pipe = calotype.causal(ours, ALONE)
    with pytest.raises(ValueError, match="num_frames is 1, with the 1 of image; it must be more than 1"):
        pipe("a cat", image=picture(16, 16), num_frames=1, **SMALL)
    with pytest.raises(ValueError, match="give one"):
        pipe("a cat", image=picture(16, 16), video=VIDEO, **SMALL)
