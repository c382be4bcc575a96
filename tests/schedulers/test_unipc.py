"""UniPC of flow models, schedules and steps, against diffusers' UniPCMultistepScheduler."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from parity import error
from torch import Tensor

from calotype.schedulers import (
    Point,
    RowNoise,
    Schedule,
    UniPC,
    UniPCConfig,
    flow_schedule_from_sigmas,
    sampler_for,
    unipc_schedule,
)

SHAPE = (2, 3, 2, 5, 4)
SEEDS = (3, 8)
WAN: dict[str, Any] = {
    "_class_name": "UniPCMultistepScheduler",
    "_diffusers_version": "0.33.0.dev0",
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "disable_corrector": [],
    "dynamic_thresholding_ratio": 0.995,
    "final_sigmas_type": "zero",
    "flow_shift": 3.0,
    "lower_order_final": True,
    "num_train_timesteps": 1000,
    "predict_x0": True,
    "prediction_type": "flow_prediction",
    "rescale_betas_zero_snr": False,
    "sample_max_value": 1.0,
    "solver_order": 2,
    "solver_p": None,
    "solver_type": "bh2",
    "steps_offset": 0,
    "thresholding": False,
    "timestep_spacing": "linspace",
    "trained_betas": None,
    "use_beta_sigmas": False,
    "use_exponential_sigmas": False,
    "use_flow_sigmas": True,
    "use_karras_sigmas": False,
}


def theirs(**changes: Any) -> Any:
    return UniPCMultistepScheduler.from_config({**WAN, **changes})


def flow(x: Tensor, time: float) -> Tensor:
    """Some smooth prediction of noise - x0, elementwise."""
    return torch.tanh(1.3 * x + 0.2 * math.sin(time * 7)) * (0.6 + time / 3)


def start() -> Tensor:
    return RowNoise(SEEDS, SHAPE).draw()


def latents_of(scheduler: Any) -> list[Tensor]:
    """After each step of diffusers' loop."""
    x, found = start(), []
    for t in scheduler.timesteps[scheduler.begin_index or 0 :]:
        x = scheduler.step(flow(x, float(t) / 1000), t, x).prev_sample
        found.append(x)
    return found


def largest_error(sampler: Any, schedule: Schedule, reference: list[Tensor]) -> float:
    steps = list(sampler(lambda x, point: flow(x, point.time), start(), schedule, RowNoise(SEEDS, SHAPE)))
    assert len(steps) == len(reference) == schedule.num_steps
    return max(error(step.latents, other) for step, other in zip(steps, reference, strict=True))


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 8.0, 16.0])
@pytest.mark.parametrize("n", [1, 2, 7, 50])
def test_schedules(shift: float, n: int) -> None:
    reference = theirs(flow_shift=shift)
    reference.set_timesteps(n)
    schedule = unipc_schedule(UniPCConfig(flow_shift=shift), n)
    assert list(schedule.sigmas) == reference.sigmas.tolist()
    assert [round(1000 * point.time, 9) for point in schedule.points] == [*reference.timesteps.tolist(), 0]


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 10, 40])
def test_steps(n: int, order: int) -> None:
    given = {**WAN, "flow_shift": 5.0, "solver_order": order}
    sampler, schedules = sampler_for(given)
    reference = theirs(flow_shift=5.0, solver_order=order)
    reference.set_timesteps(n)
    assert sampler == UniPC(order=order)
    assert largest_error(sampler, schedules(n), latents_of(reference)) < 1e-5


def test_given_sigmas_and_a_late_start() -> None:
    sampler, schedules = sampler_for(WAN)
    sigmas = [1.0, 0.9, 0.5, 0.2]
    reference = theirs()
    reference.set_timesteps(sigmas=np.array(sigmas))
    schedule = schedules(4, num_image_tokens=77, sigmas=sigmas)
    assert list(schedule.sigmas) == reference.sigmas.tolist()
    assert largest_error(sampler, schedule, latents_of(reference)) < 1e-5
    late = theirs()
    late.set_timesteps(10)
    late.set_begin_index(4)
    assert largest_error(sampler, schedules(10).starting_at(0.6), latents_of(late)) < 1e-5


def test_ended_early_it_is_the_start_of_the_whole_run() -> None:
    sampler, schedules = sampler_for(WAN)
    reference = theirs()
    reference.set_timesteps(8)
    assert largest_error(sampler, schedules(8).between(0, 5), latents_of(reference)[:5]) < 1e-5


def test_sigma_one_is_as_it_is_with_diffusers() -> None:
    """Ours keeps a sigma of exactly 1 that it is given; lambda is then that of diffusers' sigma."""
    sigmas = [1.0, 0.93, 0.6, 0.3, 0.1]
    reference = theirs(flow_shift=1.0)
    reference.set_timesteps(sigmas=np.array(sigmas))
    found = UniPC()(_at_their_time, start(), flow_schedule_from_sigmas(sigmas), RowNoise(SEEDS, SHAPE))
    for step, other in zip(found, latents_of(reference), strict=True):
        assert error(step.latents, other) < 1e-5


def _at_their_time(x: Tensor, point: Point) -> Tensor:
    return flow(x, math.floor((point.sigma - 1e-6 if point.sigma == 1.0 else point.sigma) * 1000) / 1000)


def test_many_steps_at_a_strong_shift() -> None:
    """Two first timesteps are equal then, where diffusers begins with the second and fails at the end."""
    schedule = unipc_schedule(UniPCConfig(flow_shift=16.0), 100)
    assert schedule.points[0].time == schedule.points[1].time
    *_, last = UniPC()(lambda x, point: flow(x, point.time), start(), schedule, RowNoise(SEEDS, SHAPE))
    assert last.latents.isfinite().all()


def test_entries_are_those_that_are_read() -> None:
    config = UniPCConfig(flow_shift=5.0, solver_order=3, num_train_timesteps=900)
    assert UniPCConfig.from_entries(config.entries()) == config
    assert UniPCConfig.from_entries(WAN) == UniPCConfig(flow_shift=3.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prediction_type": "epsilon"}, "prediction_type = 'epsilon' is not supported: only 'flow_prediction'"),
        ({"use_flow_sigmas": None}, "use_flow_sigmas = False is not supported: only True"),
        ({"predict_x0": False}, "predict_x0 = False"),
        ({"lower_order_final": False}, "lower_order_final = False"),
        ({"final_sigmas_type": "sigma_min"}, "final_sigmas_type = 'sigma_min'"),
        ({"solver_type": "bh1"}, "solver_type = 'bh1' is not supported: only 'bh2'"),
        ({"use_karras_sigmas": True}, "use_karras_sigmas = True"),
        ({"use_dynamic_shifting": True}, "use_dynamic_shifting = True"),
        ({"disable_corrector": [0]}, r"disable_corrector = \[0\]"),
        ({"flow_shift": 0.0}, "flow_shift must be positive, got 0"),
        ({"solver_order": 0}, "solver_order must be at least 1, got 0"),
        ({"num_train_timesteps": 1}, "num_train_timesteps must be at least 2, got 1"),
    ],
)
def test_what_makes_no_schedule_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler_for({**WAN, **changes})


def test_bad_requests() -> None:
    config = UniPCConfig()
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        unipc_schedule(config, 0)
    with pytest.raises(ValueError, match="2 sigmas were given for 3 steps"):
        unipc_schedule(config, 3, sigmas=[1.0, 0.5])
    with pytest.raises(ValueError, match="the last of the given sigmas is 0"):
        unipc_schedule(config, 2, sigmas=[1.0, 0.0])
    with pytest.raises(ValueError, match="order must be at least 1, got 0"):
        UniPC(order=0)
