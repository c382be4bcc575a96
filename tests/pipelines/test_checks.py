"""Stages that are given what they do not take: one line, before anything is computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import fake_pipeline

from calotype.pipelines.image import ImagePipeline
from calotype.pipelines.request import Request

CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "cancel": (lambda pipe: pipe("a", cancel=True), "cancel is True; it must be a threading.Event"),
    "cancel of a stream": (lambda pipe: pipe.stream("a", cancel="x"), "cancel is 'x'; it must be a threading.Event"),
    "cancel of denoise": (
        lambda pipe: pipe.denoise(pipe.encode(Request(prompt="a")), cancel=0),
        "cancel is 0; it must be a threading.Event",
    ),
    "on_step": (lambda pipe: pipe("a", on_step=5), "on_step is 5; it must be a function that takes a step"),
    "encode": (lambda pipe: pipe.encode("a"), "request is 'a'; it must be a Request"),
    "denoise": (lambda pipe: pipe.denoise("a"), r"encoded is 'a'; it must be what pipe\.encode returned"),
    "decode": (lambda pipe: pipe.decode("x"), "latents is 'x'; it must be a step, or a tensor of latents"),
    "decode of a run": (
        lambda pipe: pipe.decode(torch.zeros(1, 4, 1, 4, 4), "x"),
        r"encoded is 'x'; it must be what pipe\.encode returned",
    ),
    "preview": (lambda pipe: pipe.preview(5), "step is 5; it must be a step"),
}


@pytest.fixture
def pipe() -> ImagePipeline:
    return fake_pipeline()


@pytest.mark.parametrize("name", CALLS)
def test_wrong_kinds(pipe: ImagePipeline, name: str):
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=f"^{message}$"):
        call(pipe)


@pytest.mark.parametrize("axis", range(5))
@pytest.mark.parametrize("change", ["empty", "more"])
def test_latents_of_another_shape(pipe: ImagePipeline, axis: int, change: str):
    encoded = pipe.encode(Request(prompt="a"))
    shape = list(encoded.shape)
    shape[axis] = 0 if change == "empty" else shape[axis] + 1
    with pytest.raises(ValueError, match=r"^latents have shape \(.*\); [^\n]*$"):
        pipe.decode(torch.zeros(shape), encoded)
    if change == "empty":
        with pytest.raises(ValueError, match=r"expected \[N, \d, 1, h, w\], each at least 1$"):
            pipe.decode(torch.zeros(shape))
    assert pipe.decode(torch.zeros(encoded.shape), encoded).seeds == encoded.plan.seeds
