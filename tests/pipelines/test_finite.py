from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import FakeDenoiser, FakeVAE, fake_pipeline
from torch import Tensor

from calotype.denoisers.base import Conditioning
from calotype.denoisers.guidance import ClassifierFree, Unguided
from calotype.pipelines.finite import NonFiniteError
from calotype.pipelines.image import ImagePipeline
from calotype.schedulers import Euler, Noise, Schedule, Slope, State, Step, sampler_names


@pytest.fixture
def pipe() -> ImagePipeline:
    return fake_pipeline()


def poison(pipe: ImagePipeline, block: int | None, below: float) -> None:
    assert isinstance(pipe.denoiser, FakeDenoiser)
    pipe.denoiser.poisoned_block, pipe.denoiser.poison_below = block, below


@pytest.mark.parametrize("sampler", sampler_names())
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("block", [0, 2])
def test_the_step_and_the_block_are_named(pipe: ImagePipeline, sampler: str, batched: bool, block: int):
    poison(pipe, block, 0.3)
    step = 2 if sampler == "heun" else 3  # Heun's third step also looks at where it ends
    with pytest.raises(NonFiniteError, match=f"denoise, step {step} of 4 .*, block {block} of 3") as caught:
        pipe("a", seed=1, sampler=sampler, sigmas=[1.0, 0.8, 0.5, 0.2], guidance=ClassifierFree(2.0, batched=batched))
    error = caught.value
    assert (error.stage, error.step, error.total, error.block) == ("denoise", step, 4, f"block {block} of 3")


def test_the_first_step(pipe: ImagePipeline):
    poison(pipe, 1, 2.0)
    with pytest.raises(NonFiniteError, match=r"step 0 of 4 .*, block 1 of 3"):
        pipe("a")


def test_after_the_blocks(pipe: ImagePipeline):
    poison(pipe, None, 0.6)
    with pytest.raises(NonFiniteError, match=r"step 2 of 4 .*, after the last block"):
        pipe("a")


class BrokenSampler(Euler):
    """Euler, whose second step ends in infinity."""

    def __call__(
        self, slope: Slope, x: Tensor, schedule: Schedule, noise: Noise, state: State | None = None
    ) -> Iterator[Step]:
        for step in super().__call__(slope, x, schedule, noise, state):
            yield replace(step, latents=step.latents / 0) if step.index == 1 else step


def test_in_the_sampler(pipe: ImagePipeline):
    with pytest.raises(NonFiniteError, match=r"step 1 of 4 .*, in the sampler euler"):
        pipe("a", sampler=BrokenSampler())


def test_what_the_sampler_asks_for(pipe: ImagePipeline):
    class Wild(Euler):
        def __call__(self, slope: Slope, x: Tensor, *rest: Any) -> Iterator[Step]:
            yield from super().__call__(slope, x * torch.inf, *rest)

    with pytest.raises(NonFiniteError, match=r"step 0 of 4 .*, the sampler's latents"):
        pipe("a", sampler=Wild())


def test_only_on_this_occasion(pipe: ImagePipeline):
    denoiser = pipe.denoiser
    assert isinstance(denoiser, FakeDenoiser)
    honest, calls = denoiser.slope, list[int]()

    def once(x, prepared, point):  # type: ignore[no-untyped-def]
        calls.append(point.index)
        d = honest(x, prepared, point)
        return d * torch.nan if len(calls) == 2 else d

    denoiser.slope = once  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match=r"step 1 of 4 .*not when the step was run again"):
        pipe("a", guidance=Unguided())


def test_the_decoder(pipe: ImagePipeline):
    assert isinstance(pipe.vae, FakeVAE)
    pipe.vae.broken = True
    with pytest.raises(NonFiniteError, match="non-finite values in decode"):
        pipe("a")
    assert pipe("a", output_type="latent").images is None


def test_the_encoders(pipe: ImagePipeline):
    states = Conditioning(states=torch.full((1, 2, 6), torch.nan), lengths=torch.tensor([2]))
    with pytest.raises(NonFiniteError, match="non-finite values in encode"):
        pipe(conditioning=states)
    assert isinstance(pipe.vae, FakeVAE)
    pipe.vae.encode = lambda pixels: torch.full((1, 4, 1, 4, 4), torch.inf)  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match="non-finite values in encode"):
        pipe("a", image=torch.zeros(3, 32, 32))
