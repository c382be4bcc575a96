"""Samplers step by step against diffusers' schedulers, driven by one model.

The model sees x_vp = x / sqrt(1 + sigma^2) on both sides. Latents are compared on the exploding path.
"""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_euler_ancestral_discrete import EulerAncestralDiscreteScheduler
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_lcm import LCMScheduler
from diffusers.schedulers.scheduling_pndm import PNDMScheduler
from parity import error
from torch import Tensor

from calotype.schedulers import (
    DDIM,
    LCM,
    PNDM,
    DiscreteConfig,
    EulerAncestral,
    Point,
    RowNoise,
    Sampler,
    Schedule,
    discrete_schedule,
    final_latent_scale,
    flow_schedule,
    initial_noise_scale,
    sampler_for,
)

# diffusers makes arrays of tensors in a way that numpy gives up
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SHAPE = (2, 3, 1, 5, 4)
SEEDS = (3, 8)
SD: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
CLASSES: dict[str, Any] = {
    "EulerDiscreteScheduler": EulerDiscreteScheduler,
    "EulerAncestralDiscreteScheduler": EulerAncestralDiscreteScheduler,
    "DDIMScheduler": DDIMScheduler,
    "PNDMScheduler": PNDMScheduler,
    "DPMSolverMultistepScheduler": DPMSolverMultistepScheduler,
    "LCMScheduler": LCMScheduler,
}
NEEDED: dict[str, dict[str, Any]] = {
    "DDIMScheduler": {"clip_sample": False},
    "PNDMScheduler": {"skip_prk_steps": True},
}


def eps(x_vp: Tensor, time: float) -> Tensor:
    """Some smooth prediction of the noise, elementwise."""
    return torch.tanh(1.3 * x_vp + 0.2 * math.sin(time / 150)) * (0.6 + time / 2500)


def slope(x: Tensor, point: Point) -> Tensor:
    return eps(x / math.sqrt(1 + point.sigma**2), point.time)


def start() -> Tensor:
    return RowNoise(SEEDS, SHAPE).draw()


def entries(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"_class_name": name, **SD, **NEEDED.get(name, {}), **options}


def theirs(given: dict[str, Any], n: int, **step: Any) -> Iterator[Tensor]:
    """The latents after each step of diffusers' loop."""
    options = {key: value for key, value in given.items() if key != "_class_name"}
    scheduler = CLASSES[given["_class_name"]].from_config(options)
    scheduler.set_timesteps(n)
    x = start() * scheduler.init_noise_sigma
    for t in scheduler.timesteps:
        x = scheduler.step(eps(scheduler.scale_model_input(x, t), float(t)), t, x, **step).prev_sample
        yield x


def generators() -> list[torch.Generator]:
    """Where `ours` goes on drawing after its first draw."""
    found = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    for generator in found:
        torch.randn(SHAPE[1:], generator=generator)
    return found


def ours(given: dict[str, Any], n: int, sampler: Sampler | None = None) -> tuple[Schedule, list[Tensor]]:
    config = DiscreteConfig.from_entries(given)
    named, schedules = sampler_for(given)
    schedule, noise = schedules(n), RowNoise(SEEDS, SHAPE)
    x = noise.draw() * initial_noise_scale(config, schedule)
    return schedule, [step.latents for step in (sampler or named)(slope, x, schedule, noise)]


def compare(given: dict[str, Any], n: int, reference: list[Tensor], sampler: Sampler | None = None) -> None:
    schedule, found = ours(given, n, sampler)
    assert len(found) == len(reference) == n
    is_ours = given["_class_name"].startswith("Euler")
    for x, other, sigma in zip(found, reference, schedule.sigmas[1:], strict=True):
        assert error(x, other if is_ours else other * math.sqrt(1 + sigma**2)) < 1e-5
    config = DiscreteConfig.from_entries(given)
    assert error(found[-1] * final_latent_scale(config, schedule), reference[-1]) < 1e-5


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("n", [1, 2, 5, 17])
def test_euler_and_dpmpp_2m(spacing: str, n: int) -> None:
    for name in ("EulerDiscreteScheduler", "DPMSolverMultistepScheduler"):
        for options in ({}, {"use_karras_sigmas": True}):
            given = entries(name, {"timestep_spacing": spacing, **options})
            compare(given, n, list(theirs(given, n)))


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("n", [1, 2, 5, 17])
def test_euler_ancestral(spacing: str, n: int) -> None:
    given = entries("EulerAncestralDiscreteScheduler", {"timestep_spacing": spacing})
    compare(given, n, list(theirs(given, n, generator=generators())))


@pytest.mark.parametrize("at_one", [True, False])
@pytest.mark.parametrize("eta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("spacing", "counts"), [("leading", (1, 2, 5, 17, 30)), ("trailing", (1, 2, 5, 20))])
def test_ddim(spacing: str, counts: tuple[int, ...], eta: float, at_one: bool) -> None:
    given = entries("DDIMScheduler", {"timestep_spacing": spacing, "set_alpha_to_one": at_one})
    for n in counts:
        compare(given, n, list(theirs(given, n, eta=eta, generator=generators())), DDIM(eta=eta))


@pytest.mark.parametrize("at_one", [True, False])
@pytest.mark.parametrize(("spacing", "counts"), [("leading", (1, 2, 3, 4, 5, 30)), ("trailing", (1, 2, 4, 5, 20))])
def test_pndm(spacing: str, counts: tuple[int, ...], at_one: bool) -> None:
    """diffusers yields its first step twice: before and after the correction."""
    given = entries("PNDMScheduler", {"timestep_spacing": spacing, "set_alpha_to_one": at_one})
    for n in counts:
        found = list(theirs(given, n))
        compare(given, n, found[1:] if n > 1 else found)


@pytest.mark.parametrize("options", [{}, {"timestep_scaling": 0.01, "original_inference_steps": 100}])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_lcm(options: dict[str, Any], n: int) -> None:
    given = entries("LCMScheduler", options)
    compare(given, n, list(theirs(given, n, generator=generators())))


def test_lcm_without_a_scaling_is_its_limit() -> None:
    given = entries("LCMScheduler", {})
    _, plain = ours(given, 4, LCM())
    _, mixed = ours(given, 4)
    assert 0.0 < error(plain[-1], mixed[-1]) < 1e-3


@pytest.mark.parametrize("n", [7, 30])
def test_ddim_and_pndm_end_each_step_at_the_next_timestep(n: int) -> None:
    """diffusers' step of N // n timesteps ends elsewhere with trailing spacing, unless n divides N."""
    for name in ("DDIMScheduler", "PNDMScheduler"):
        given = entries(name, {"timestep_spacing": "trailing"})
        schedule, found = ours(given, n)
        times = [point.time for point in schedule.points[:-1]]
        assert any(a - b != 1000 // n for a, b in pairwise(times))
        *_, last = theirs(given, n)
        assert 1e-5 < error(found[-1], last) < 0.05


def test_ddim_is_euler_ancestral_on_the_exploding_path() -> None:
    given = entries("DDIMScheduler", {})
    for eta in (0.3, 1.0):
        for a, b in zip(ours(given, 6, DDIM(eta=eta))[1], ours(given, 6, EulerAncestral(eta=eta))[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{"shift": 3.0}, {"shift": 0.7, "shift_terminal": 0.1}])
@pytest.mark.parametrize("n", [2, 5])
def test_flow_euler(options: dict[str, Any], n: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(**options)
    scheduler.set_timesteps(n)
    sampler, schedules = sampler_for({"_class_name": "FlowMatchEulerDiscreteScheduler", **options})
    noise = RowNoise(SEEDS, SHAPE)
    x, schedule = start(), schedules(n)
    flow: Callable[[Tensor, Point], Tensor] = lambda x, point: eps(x, 1000 * point.time)  # noqa: E731
    for step, t in zip(sampler(flow, start(), schedule, noise), scheduler.timesteps, strict=True):
        x = scheduler.step(eps(x, float(t)), t, x).prev_sample
        assert error(step.latents, x) < 1e-5


def test_ddim_on_the_flow_path_samples_the_forward_process() -> None:
    """With the exact x0, a step from the forward process at a point is the forward process at the next."""
    x0 = torch.full((1, 1, 1, 200, 200), 0.7)
    schedule = flow_schedule(5, shift=2.0)
    for eta in (0.5, 1.0):
        noise = RowNoise([4], x0.shape)
        x = schedule.points[0].noised(x0, noise.draw())
        run = DDIM(eta=eta)(lambda x, p: (x - x0) / p.sigma, x, schedule, noise)
        for step, point in zip(run, schedule.points[1:], strict=True):
            assert float(step.latents.mean()) == pytest.approx(point.alpha * 0.7, abs=0.03)
            assert float(step.latents.std()) == pytest.approx(point.sigma, rel=0.03, abs=1e-5)


def test_pndm_asks_for_its_second_point_twice() -> None:
    asked: list[int] = []

    def recording(x: Tensor, point: Point) -> Tensor:
        asked.append(point.index)
        return slope(x, point)

    config = DiscreteConfig.from_entries(entries("PNDMScheduler", {}))
    for n, expected in ((1, [0]), (2, [0, 1, 1]), (4, [0, 1, 1, 2, 3])):
        asked.clear()
        list(PNDM()(recording, start(), discrete_schedule(config, n), RowNoise(SEEDS, SHAPE)))
        assert asked == expected


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="timestep_scaling must be positive, got 0"):
        LCM(timestep_scaling=0.0)
    with pytest.raises(ValueError, match="this schedule is on the flow path"):
        next(iter(LCM(timestep_scaling=10.0)(slope, start(), flow_schedule(2), RowNoise(SEEDS, SHAPE))))
    with pytest.raises(ValueError, match=r"eta must lie in \[0, 1\], got 1.5"):
        DDIM(eta=1.5)
