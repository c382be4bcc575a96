"""What every picture family promises (docs/contract.md), on a tiny random checkpoint of each."""

import copy
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from parity import error

import calotype
from calotype.pipelines.base import Cancelled, last
from calotype.pipelines.finite import NonFiniteError

from ..tiny_flux import flux_pipeline
from ..tiny_flux2 import flux2_pipeline
from ..tiny_qwen_image import qwen_image_pipeline
from ..tiny_sd import sd_pipeline, sdxl_pipeline
from ..tiny_sd3 import sd3_pipeline
from ..tiny_wan_pipeline import wan_pipeline
from ..tiny_z_image import BASE, z_image_pipeline

PROMPTS = ["a cat", " ".join(["two old dogs on the grass and a cat on the river of a red fox"] * 2)]
NEGATIVE = ["a photo of the river", ""]
SIZE = {"height": 48, "width": 32}
GUIDANCE: dict[str, dict[str, Any]] = {
    "flux": {"true_cfg_scale": 2.0},
    "qwen_image": {"true_cfg_scale": 2.0},
    "wan": {"guidance_scale": 2.0, "num_frames": 1},  # a clip of one frame is a picture
}
BUILDERS = {
    "flux": lambda folder: flux_pipeline(True, folder),
    "flux2": lambda folder: flux2_pipeline("klein base", folder),
    "qwen_image": qwen_image_pipeline,
    "sd": sd_pipeline,
    "sd3": lambda folder: sd3_pipeline("medium", folder),
    "sdxl": sdxl_pipeline,
    "wan": wan_pipeline,
    "z_image": lambda folder: z_image_pipeline(BASE, folder),
}
UNET = ("unet.mid_block.", "the middle block")
POISONED = {"sd": UNET, "sdxl": UNET}
"""What the names of one block's weights begin with, and how an error names it, where it is not the second of a list."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline of a family, and the arguments of a guided call of two steps."""

    family: str
    pipe: Any

    @property
    def reading(self) -> dict[str, Any]:
        """How prompts are read: where the family says how long, cut."""
        return {"max_sequence_length": 40} if "max_sequence_length" in self.pipe.family.arguments else {}

    @property
    def rest(self) -> dict[str, Any]:
        return {"num_inference_steps": 2, **SIZE, **GUIDANCE.get(self.family, {"guidance_scale": 2.0})}

    def latents(self, prompt: Any, **arguments: Any) -> torch.Tensor:
        return self.pipe(prompt, **{**self.rest, **self.reading, "output_type": "latent", **arguments}).latents


@pytest.fixture(scope="module", params=[*BUILDERS])
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "model"
    BUILDERS[request.param](folder)
    return Case(family=request.param, pipe=calotype.load(folder))


def test_a_row_of_a_batch_is_that_row_alone(case):
    """Prompt-major, each row by its own seed, whatever the lengths of the others' prompts are."""
    prompts = list(PROMPTS)
    made = case.pipe(
        prompts,
        negative_prompt=NEGATIVE,
        num_images_per_prompt=2,
        seed=5,
        output_type="latent",
        **case.rest,
        **case.reading,
    )
    assert prompts == PROMPTS
    assert made.seeds == (5, 6, 7, 8)
    for row in (0, 1, 3):
        alone = case.latents(PROMPTS[row // 2], negative_prompt=NEGATIVE[row // 2], seed=5 + row)
        assert error(alone, made.latents[row : row + 1]) < 1e-5


def test_two_threads_on_one_pipeline(case):
    calls = [{"prompt": PROMPTS[0], "num_inference_steps": 3, "seed": 1}, {"prompt": PROMPTS[1], "seed": 2}]
    expected = [case.latents(**call) for call in calls]
    start = threading.Barrier(2)

    def run(call):
        start.wait()
        return case.latents(**call)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, calls))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_cancelling_ends_within_a_step_and_decodes_nothing(case):
    @dataclass(frozen=True)
    class NoDecoder:
        latent_channels: int = case.pipe.vae.latent_channels
        downsampling: int = case.pipe.vae.downsampling

        def encode(self, pixels, noise=None):
            raise AssertionError("there is nothing to encode")

        def decode(self, latents):
            raise AssertionError("a cancelled run was decoded")

    cancel, seen = threading.Event(), []

    def stop(step):
        seen.append(step.index)
        cancel.set()

    pipe = dataclasses.replace(case.pipe, vae=NoDecoder())
    with pytest.raises(Cancelled) as caught:
        pipe(PROMPTS[0], seed=1, on_step=stop, cancel=cancel, **case.rest, **case.reading)
    assert seen == [0]
    assert caught.value.step.index == 0
    left = last(case.pipe.denoise(caught.value.step.encoded, resume=caught.value.step.state))
    assert torch.equal(case.pipe.decode(left).latents, case.latents(PROMPTS[0], seed=1))


def test_an_empty_prompt_is_a_prompt(case):
    """A picture of nothing in particular, beside others as alone."""
    together = case.latents(["", PROMPTS[0]], seed=[1, 2])
    assert bool(together.isfinite().all())
    assert error(together[:1], case.latents("", seed=1)) < 1e-5


def test_one_step_is_finite(case):
    arguments = {**case.rest, **case.reading, "num_inference_steps": 1, "output_type": "np", "seed": 3}
    steps = list(case.pipe.stream(PROMPTS[0], **arguments))
    assert [step.total for step in steps] == [1]
    assert bool(steps[0].latents.isfinite().all())
    assert numpy.isfinite(case.pipe.decode(steps[0]).images).all()


def test_a_block_that_is_not_finite_is_named(case):
    denoiser = copy.deepcopy(case.pipe.denoiser)
    beginning, place = POISONED.get(case.family, ("blocks.1.", r"block 1 of \d"))
    weight = next(weight for name, weight in denoiser.named_parameters() if name.startswith(beginning))
    weight.data.fill_(torch.nan)
    pipe = dataclasses.replace(case.pipe, denoiser=denoiser)
    with pytest.raises(NonFiniteError, match=place) as caught:
        pipe(PROMPTS[0], seed=1, **case.rest, **case.reading)
    assert (caught.value.stage, caught.value.step, caught.value.total) == ("denoise", 0, 2)
    assert bool(case.latents(PROMPTS[0], seed=1).isfinite().all())


def test_sizes_are_exact(case):
    """Pictures are of the size asked for; a size that cannot be made names both neighbours."""
    made = case.pipe(PROMPTS[0], seed=1, output_type="np", **{**case.rest, "num_inference_steps": 1}, **case.reading)
    assert made.images.shape == (1, SIZE["height"], SIZE["width"], 3)
    multiple = case.pipe.recipe.size_multiple
    for side in ("height", "width"):
        below = SIZE[side] // multiple * multiple
        wrong = {**case.rest, side: below + 1}
        with pytest.raises(ValueError, match=f"{side} is {below + 1}; .* such as {below} or {below + multiple}"):
            case.pipe(PROMPTS[0], **wrong, **case.reading)


def test_a_call_is_decode_of_the_last_of_stream(case):
    arguments = {**case.rest, **case.reading, "seed": 4, "negative_prompt": NEGATIVE[0], "output_type": "np"}
    whole = case.pipe(PROMPTS[0], **arguments)
    parts = case.pipe.decode(last(case.pipe.stream(PROMPTS[0], **arguments)))
    assert numpy.array_equal(whole.images, parts.images)
    assert torch.equal(whole.latents, parts.latents)


def test_precomputed_conditioning_changes_nothing(case):
    arguments = {**case.rest, "seed": 6, "output_type": "latent"}
    request = calotype.Request(prompt=PROMPTS, negative_prompt=NEGATIVE, **arguments, **case.reading)
    told = case.pipe.encode(request).conditioning
    whole = case.pipe(PROMPTS, negative_prompt=NEGATIVE, **arguments, **case.reading).latents
    assert torch.equal(whole, case.pipe(conditioning=told, **arguments).latents)


def test_replay_makes_the_same_picture(case, tmp_path):
    made = case.pipe(PROMPTS[1], negative_prompt=NEGATIVE[0], seed=7, **case.rest, **case.reading)
    made.save(tmp_path / "made.png")
    again = calotype.replay(tmp_path / "made.png", pipeline=case.pipe)
    assert again.bit_equal
    assert again.remarks == ()
