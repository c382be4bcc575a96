"""Clips that go on, made chunk by chunk: of any length, kept as they are, resumed."""

import dataclasses
from types import SimpleNamespace

import numpy
import pytest
import torch
from causal_reference import compare

import calotype
from calotype import Chunks, Request, State

from ..tiny_causal import causal_folder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

PROMPTS = ["a photo of a red fox", "two old dogs on the grass &amp; a  cat"]
ALONE = Chunks(frames=2, independent_first_frame=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Ours, and diffusers' network; 4 frames a group, 2 latent frames a chunk: 5, 13, 21 frames."""
    folder = tmp_path_factory.mktemp("causal") / "model"
    theirs = causal_folder(folder, num_frames_per_block=2)
    return SimpleNamespace(network=theirs.transformer, ours=calotype.load(folder))


@pytest.fixture(scope="module")
def ours(made):
    return made.ours


@torch.no_grad()
def test_a_clip_goes_on(made, ours):
    """Its latents are the first ones of the result, and its chunks are seen by those that are made."""
    frames, begin = clip_of(ours, 13)
    last = compare(made.network, ours, Request(prompt="a cat", num_frames=25, video=frames, seed=5), (5,), begin)
    assert torch.equal(last.latents[:, :, :4], begin)
    result = ours.decode(last)
    assert [len(clip) for clip in result.videos] == [25]
    assert result.warnings == ("num_frames 25: the model makes 29, of which the first 25 are returned",)
    assert (result.manifest.task, result.manifest.strength) == ("video-to-video", None)
    streamed = list(ours.stream_frames("a cat", num_frames=25, video=frames, seed=5, output_type="np"))
    whole = ours("a cat", num_frames=25, video=frames, seed=5, output_type="np")
    assert numpy.array_equal(numpy.concatenate(streamed, axis=1), whole.videos)


def clip_of(ours, count, width=24):
    """Random frames [F, H, W, 3], and the latents of those that the model sees, the last 1 + 4 n."""
    frames = numpy.random.default_rng(0).integers(0, 256, (count, 16, width, 3), dtype=numpy.uint8)
    pixels = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    return frames, ours.vae.encode(pixels[:, :, (count - 1) % 4 :])


@pytest.mark.parametrize(
    ("chunks", "given", "begun", "warned"),
    [
        (Chunks(frames=2), 5, (2,), ()),
        (Chunks(frames=2), 4, (1,), ("sees the last 1", "its last 1 frames are no whole chunks (5 are)")),
        (Chunks(frames=2), 9, (1, 2), ("its last 9 frames are no whole chunks (5 or 13 are); the model sees a short",)),
        (Chunks(frames=2), 8, (2,), ("video has 8 frames, of which the model sees the last 5",)),
        (Chunks(frames=3), 18, (2, 3), ("sees the last 17", "(9 or 21 are)")),
        (ALONE, 14, (1, 1, 2), ("sees the last 13", "(9 or 17 are)")),
        (Chunks(frames=2, window=4), 15, (2, 2), ("sees the last 13",)),
        (Chunks(frames=2, window=5, sink=2), 10, (1, 2), ("sees the last 9", "(5 or 13 are)")),
    ],
)
@torch.no_grad()
def test_a_clip_of_any_length_goes_on(made, ours, chunks, given, begun, warned):
    """All its frames come first in the result as they are, and those that are made follow the last one."""
    pipe, (frames, begin), count = calotype.causal(ours, chunks), clip_of(ours, given), given + 7
    assert chunks.begun(begin.shape[2]) == begun
    told = {"num_frames": count, "video": frames, "seed": 5}
    last = compare(made.network, pipe, Request(prompt="a cat", **told), (5,), begin)
    result = pipe.decode(last)
    (clip,), (decoded,) = result.clips(), ours.decode(last.latents).clips()
    assert numpy.array_equal(clip[:given], frames)
    assert len(clip) == count
    assert numpy.array_equal(clip[given:], decoded[given - (given - 1) % 4 :][:7])
    found = [warning for warning in result.warnings if not warning.startswith("num_frames")]
    assert len(found) == len(warned)
    assert all(part in warning for part, warning in zip(warned, found, strict=True))
    streamed = list(pipe.stream_frames("a cat", output_type="np", **told))
    assert streamed[0].shape[1] == given
    whole = pipe("a cat", output_type="np", **told).videos
    assert numpy.array_equal(numpy.concatenate(streamed, axis=1), whole)


@pytest.mark.parametrize(("sampler", "given"), [(None, 5), ("dpmpp_2m", 5), (None, 10)])
def test_runs_resume_after_any_step(ours, sampler, given):
    frames, begin = clip_of(ours, given, width=16)
    encoded = ours.encode(Request(prompt=PROMPTS, num_frames=21, video=frames, seed=1, sampler=sampler))
    steps = list(ours.denoise(encoded))
    assert len(steps) == 8
    for step in steps:
        state = State.from_tensors(step.state.to_tensors())
        again = list(ours.denoise(encoded, resume=state))
        assert torch.equal(again[-1].latents, steps[-1].latents)
        assert [each.index for each in again] == list(range(step.index + 1, 8)) or step.index == 7
    for state, message in (
        (dataclasses.replace(steps[0].state, index=9), "saved after step 9, this run has 8 steps"),
        (
            dataclasses.replace(steps[0].state, index=5),
            rf"\(2, 4, {2 + begin.shape[2]}, 4, 4\), this run has \(2, 4, {4 + begin.shape[2]}, 4, 4\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            ours.denoise(encoded, resume=state)
