"""What the tests of clips' pipelines share: checks that each family's passes. `told` are the arguments of short runs of
small clips, whose groups have 4 frames."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch

import calotype
from calotype.pipelines.base import Cancelled


def check_exactly_the_frames_that_are_asked_for(ours, told, *, asked, made):
    """The first of those that are made. Both results, the whole and the first of it."""
    told = {**told, "output_type": "np"}
    whole, cut = ours(num_frames=made, **told), ours(num_frames=asked, **told)
    assert cut.videos.shape == (1, asked, told["height"], told["width"], 3)
    assert numpy.array_equal(cut.videos, whole.videos[:, :asked])
    assert cut.warnings == (f"num_frames {asked}: the model makes {made}, of which the first {asked} are returned",)
    return whole, cut


def check_any_number_of_frames(ours, told, frames):
    """What is planned, and what is decoded of that."""
    encoded = ours.encode(calotype.Request(prompt="a cat", num_frames=frames, output_type="np", **told))
    height, width = told["height"], told["width"]
    cells = (height // ours.vae.downsampling, width // ours.vae.downsampling)
    assert encoded.shape == (1, 4, -(-(frames - 1) // 4) + 1, *cells)
    assert ours.decode(torch.zeros(encoded.shape), encoded).videos.shape == (1, frames, height, width, 3)
    assert bool(encoded.warnings) == (frames % 4 != 1)


def check_stages_compose_and_resume(ours, told):
    """Stage by stage, from a state, and with conditioning that is given, it is the same clip, bit by bit. The whole
    result, and the conditioning."""
    told = {**told, "output_type": "np"}
    whole, encoded = ours(**told), ours.encode(calotype.Request(**told))
    steps = list(ours.denoise(encoded))
    again = list(ours.denoise(encoded, resume=steps[0].state))
    without = {name: value for name, value in told.items() if name != "prompt"}
    given = ours(conditioning=encoded.conditioning, **without)
    assert torch.equal(again[-1].latents, whole.latents)
    for result in (ours.decode(steps[-1]), ours.decode(again[-1]), given):
        assert numpy.array_equal(result.videos, whole.videos)
    return whole, encoded.conditioning


def check_cancelling_decodes_nothing(ours, told, monkeypatch):
    """Within a step."""
    cancel = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(type(ours.vae), "decode", None)
        with pytest.raises(Cancelled, match="after step 1 of 3"):
            ours(cancel=cancel, on_step=lambda _: cancel.set(), **{**told, "num_inference_steps": 3})


def check_two_threads(ours, told, calls):
    """Each of the calls is as it is alone."""
    told = {"output_type": "np", "progress": False, **told}
    expected = [ours(**{**told, **call}).videos for call in calls]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda call: ours(**{**told, **call}).videos, calls))
    assert all(numpy.array_equal(a, b) for a, b in zip(found, expected, strict=True))
