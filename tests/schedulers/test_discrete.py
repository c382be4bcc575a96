"""Schedules of DDPM-type schedulers against diffusers' own."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_euler_ancestral_discrete import EulerAncestralDiscreteScheduler
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from diffusers.schedulers.scheduling_lcm import LCMScheduler
from diffusers.schedulers.scheduling_pndm import PNDMScheduler

from calotype.schedulers import (
    DDIM,
    DPMPP2M,
    LCM,
    PNDM,
    DiscreteConfig,
    Euler,
    EulerAncestral,
    Schedule,
    discrete_schedule,
    final_latent_scale,
    initial_noise_scale,
    sampler_for,
    scheduler_names,
)

# diffusers makes arrays of tensors in a way that numpy gives up
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SD: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
COSINE: dict[str, Any] = {"beta_schedule": "squaredcos_cap_v2"}
EULER, ANCESTRAL = "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler"
DPM = "DPMSolverMultistepScheduler"
CLASSES: dict[str, Any] = {
    EULER: EulerDiscreteScheduler,
    ANCESTRAL: EulerAncestralDiscreteScheduler,
    "DDIMScheduler": DDIMScheduler,
    "PNDMScheduler": PNDMScheduler,
    DPM: DPMSolverMultistepScheduler,
    "LCMScheduler": LCMScheduler,
}
NEEDED: dict[str, dict[str, Any]] = {
    "DDIMScheduler": {"clip_sample": False},
    "PNDMScheduler": {"skip_prk_steps": True},
}
SPACINGS = ("leading", "trailing", "linspace")
COUNTS = (1, 2, 4, 7, 28, 50)
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sd offset": {**SD, "steps_offset": 1},
    "cosine, 500": {**COSINE, "num_train_timesteps": 500},
    "zero snr": {**SD, "rescale_betas_zero_snr": True},
    "karras": {**SD, "use_karras_sigmas": True},
    "karras between": {**SD, "use_karras_sigmas": True, "sigma_min": 0.05, "sigma_max": 9.0},
    "cosine karras": {**COSINE, "use_karras_sigmas": True, "final_sigmas_type": "sigma_min"},
    "exponential": {**SD, "use_exponential_sigmas": True},
    "ends above": {**SD, "steps_offset": 1, "final_sigmas_type": "sigma_min"},
    "clipped": {**COSINE, "lambda_min_clipped": -5.1},
}


def entries(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"_class_name": name, **NEEDED.get(name, {}), **options}


def config(name: str, options: dict[str, Any]) -> DiscreteConfig:
    return DiscreteConfig.from_entries(entries(name, options))


def reference(name: str, options: dict[str, Any], n: int | None, **arguments: Any) -> Any:
    """A fresh one: it keeps the state of its last run."""
    taken = {key: value for key, value in entries(name, options).items() if not key.startswith("_")}
    scheduler = CLASSES[name].from_config(taken)
    scheduler.set_timesteps(n, **arguments)
    return scheduler


def check(schedule: Schedule, scheduler: Any) -> None:
    sigmas, times = scheduler.sigmas.tolist(), scheduler.timesteps.tolist()
    assert schedule.path == "exploding" and schedule.num_steps == len(times)
    assert schedule.sigmas == pytest.approx(sigmas, rel=1e-5)
    assert [point.time for point in schedule.points[:-1]] == pytest.approx(times, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", [EULER, ANCESTRAL, DPM])
def test_sigmas_and_timesteps(name: str, options: dict[str, Any], spacing: str) -> None:
    options = {**options, "timestep_spacing": spacing}
    if name == DPM:  # it takes none from its entries, and has no final sigma above 0 here
        options = {key: value for key, value in options.items() if key[:5] not in ("sigma", "final")}
    for n in COUNTS:
        scheduler = reference(name, options, n)
        sigmas = scheduler.sigmas.tolist()
        if sigmas[-1] == sigmas[-2]:
            continue
        schedule = discrete_schedule(config(name, options), n)
        check(schedule, scheduler)
        level = math.sqrt(sigmas[0] ** 2 + 1) if name == DPM else 1.0  # its latents are ours over this
        ours = initial_noise_scale(config(name, options), schedule)
        assert ours == pytest.approx(level * float(scheduler.init_noise_sigma), rel=1e-6)
        assert name != DPM or final_latent_scale(config(name, options), schedule) == 1.0


def train_sigmas(scheduler: Any) -> torch.Tensor:
    return ((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod) ** 0.5


@pytest.mark.parametrize("at_one", [True, False])
@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("options", [{}, {**SD, "steps_offset": 1}, {**COSINE, "num_train_timesteps": 500}])
@pytest.mark.parametrize("name", ["DDIMScheduler", "PNDMScheduler"])
def test_ddim_and_pndm(name: str, options: dict[str, Any], spacing: str, at_one: bool) -> None:
    options = {**options, "timestep_spacing": spacing, "set_alpha_to_one": at_one}
    for n in COUNTS:
        scheduler = reference(name, options, n)
        times = list(dict.fromkeys(scheduler.timesteps.tolist()))  # PNDM visits the second twice
        levels = train_sigmas(scheduler)
        before = times[-1] - scheduler.config.num_train_timesteps // n
        final = float(levels[before]) if before >= 0 else 0.0 if at_one else float(levels[0])
        if final == levels[times[-1]]:
            continue
        schedule = discrete_schedule(config(name, options), n)
        assert [point.time for point in schedule.points[:-1]] == times
        assert schedule.sigmas == pytest.approx([*levels[times].tolist(), final], rel=1e-5)
        assert initial_noise_scale(config(name, options), schedule) == math.sqrt(schedule.sigmas[0] ** 2 + 1)
        assert final_latent_scale(config(name, options), schedule) == pytest.approx(1 / math.sqrt(final**2 + 1))


@pytest.mark.parametrize("options", [{}, {"original_inference_steps": 100}, {**COSINE, "num_train_timesteps": 600}])
def test_lcm(options: dict[str, Any]) -> None:
    for n in (1, 2, 3, 4, 8, 50):
        scheduler = reference("LCMScheduler", options, n)
        schedule = discrete_schedule(config("LCMScheduler", options), n)
        assert [point.time for point in schedule.points[:-1]] == scheduler.timesteps.tolist()
        assert schedule.sigmas == pytest.approx([*train_sigmas(scheduler)[scheduler.timesteps].tolist(), 0], rel=1e-5)
    with pytest.raises(ValueError, match=r"101 steps are more than the \d+ this model was distilled at"):
        discrete_schedule(config("LCMScheduler", options), 101)
    with pytest.raises(ValueError, match=r"original_inference_steps must lie in 1\.\.\d+, got 1001"):
        discrete_schedule(config("LCMScheduler", {**options, "original_inference_steps": 1001}), 1)


@pytest.mark.parametrize("name", [EULER, "DDIMScheduler"])
def test_a_last_step_of_no_length_is_left_out(name: str) -> None:
    options = {**SD, "timestep_spacing": "leading", "final_sigmas_type": "sigma_min", "set_alpha_to_one": False}
    lowest = config(name, options).train_sigmas()[0]
    schedule = discrete_schedule(config(name, options), 5)
    assert schedule.num_steps == 4 and schedule.points[-1].time == 0.0 and schedule.sigmas[-1] == lowest
    assert discrete_schedule(config(name, options), 1).sigmas == (lowest, 0.0)


def test_given_timesteps_and_sigmas() -> None:
    options = {**SD, "timestep_spacing": "trailing"}
    ours, times = config(EULER, options), [999, 749, 499, 249]
    check(discrete_schedule(ours, 4, timesteps=times), reference(EULER, options, None, timesteps=times))
    sigmas = [12.3, 5.5, 1.25, 0.3, 0.01, 0.0]
    scheduler = reference(EULER, options, None, sigmas=sigmas)
    check(discrete_schedule(ours, 5, sigmas=sigmas), scheduler)
    assert discrete_schedule(ours, 5, sigmas=sigmas[:-1]) == discrete_schedule(ours, 5, sigmas=sigmas)
    lcm = discrete_schedule(config("LCMScheduler", {}), 4, timesteps=times)
    assert [point.time for point in lcm.points] == [*times, 0.0]


def test_trained_betas() -> None:
    betas = [0.01 + 0.001 * i for i in range(20)]
    options = {"trained_betas": betas, "num_train_timesteps": 20, "timestep_spacing": "trailing"}
    check(discrete_schedule(config(EULER, options), 5), reference(EULER, options, 5))


@pytest.mark.parametrize("name", CLASSES)
def test_missing_options_have_the_class_s_own_defaults(name: str) -> None:
    ours, theirs = vars(config(name, {})), CLASSES[name]().config
    same = set(ours) & set(theirs)
    assert {"beta_start", "beta_schedule", "timestep_spacing", "steps_offset", "prediction_type"} <= same
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}


def test_any_number_of_steps_has_that_many() -> None:
    """Where diffusers' `arange` stops an ulp late, its `trailing` goes on to timestep -1."""
    ours = config(EULER, {**SD, "timestep_spacing": "trailing"})
    late = 0
    for n in [*range(1, 120), 999, 1000]:
        schedule = discrete_schedule(ours, n)
        theirs = reference(EULER, {**SD, "timestep_spacing": "trailing"}, n)
        assert schedule.num_steps == n and schedule.points[-2].time >= 0.0
        assert schedule.sigmas[:-1] == pytest.approx(theirs.sigmas.tolist()[:n], rel=1e-5)
        late += len(theirs.timesteps) != n
    assert late > 0


SAMPLERS = {
    EULER: Euler(),
    ANCESTRAL: EulerAncestral(),
    "DDIMScheduler": DDIM(),
    "PNDMScheduler": PNDM(),
    DPM: DPMPP2M(),
    "LCMScheduler": LCM(timestep_scaling=10.0),
}


@pytest.mark.parametrize("name", CLASSES)
def test_sampler_for(name: str) -> None:
    sampler, schedules = sampler_for(entries(name, SD))
    assert sampler == SAMPLERS[name]
    assert schedules(4) == discrete_schedule(config(name, SD), 4)
    assert schedules(3, num_image_tokens=9, sigmas=[9, 3, 1]).sigmas == (9, 3, 1, 0)
    assert name in scheduler_names()


def test_an_unknown_scheduler_is_refused_with_the_names() -> None:
    names = ", ".join(scheduler_names())
    assert len(scheduler_names()) == 8
    for given, said in (({"_class_name": "HeunDiscreteScheduler"}, "'HeunDiscreteScheduler'"), ({}, "no _class_name")):
        with pytest.raises(ValueError, match=f"names {said}: supported are {names}"):
            sampler_for(given)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (EULER, {"use_beta_sigmas": True}, "use_beta_sigmas = True is not supported"),
        (EULER, {"interpolation_type": "log_linear"}, "interpolation_type = 'log_linear' is not supported"),
        (EULER, {"timestep_type": "continuous"}, "timestep_type = 'continuous' is not supported"),
        (EULER, {"prediction_type": "x0"}, "prediction_type must be one of epsilon, v_prediction, sample, got 'x0'"),
        (EULER, {"beta_schedule": "sigmoid"}, "beta_schedule must be one of linear, scaled_linear, squared"),
        (EULER, {"timestep_spacing": "even"}, "timestep_spacing must be one of linspace, leading, trailing"),
        (EULER, {"beta_end": 1.5}, r"betas lie between 0 and 1, got 1\.00\d* at timestep \d+"),
        (EULER, {"trained_betas": [0.1, 0.2]}, "2 trained_betas for 1000 timesteps"),
        (EULER, {"trained_betas": "linear"}, "trained_betas must be a list of numbers, got 'linear'"),
        (EULER, {"steps_offset": -1}, r"steps_offset must lie in 0\.\.999, got -1"),
        (EULER, {"num_train_timesteps": -1}, "num_train_timesteps must be at least 1, got -1"),
        (EULER, {"beta_schedule": "scaled_linear", "beta_start": -1.0}, "betas lie between 0 and 1, got -1"),
        (EULER, {"sigma_min": -1, "use_karras_sigmas": True}, "must be positive, got -1"),
        (EULER, {"num_train_timesteps": 1}, "at least two training timesteps, got 1"),
        ("DDIMScheduler", {"clip_sample": None}, r"clip_sample = True is not supported: only False"),
        ("DDIMScheduler", {"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr = True is not supported"),
        ("LCMScheduler", {"thresholding": True}, "thresholding = True is not supported"),
        ("PNDMScheduler", {"skip_prk_steps": False}, "skip_prk_steps = False is not supported: only True"),
        ("PNDMScheduler", {"prediction_type": "v_prediction"}, "'v_prediction' is not supported: only 'epsilon'"),
        (DPM, {"algorithm_type": "sde-dpmsolver++"}, "algorithm_type = 'sde-dpmsolver.*' is not supported"),
        (DPM, {"solver_order": 3}, "solver_order = 3 is not supported: only 2"),
        (DPM, {"solver_type": "heun"}, "solver_type = 'heun' is not supported"),
        (DPM, {"final_sigmas_type": "sigma_min"}, "final_sigmas_type = 'sigma_min' is not supported: only 'zero'"),
        (DPM, {"use_flow_sigmas": True}, "use_flow_sigmas = True is not supported"),
        (DPM, {"use_new_sigmas": True}, "unknown option 'use_new_sigmas' = True"),
    ],
)
def test_bad_entries(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(name, options)


def test_bad_arguments() -> None:
    euler = config(EULER, {**SD, "timestep_spacing": "leading", "steps_offset": 1})
    for n in (0, 1001):
        with pytest.raises(ValueError, match=rf"number of steps must lie in 1\.\.1000, got {n}"):
            discrete_schedule(euler, n)
    with pytest.raises(ValueError, match=r"timestep 1000 at position 0 was not trained: 0\.\.999"):
        discrete_schedule(euler, 1000)
    with pytest.raises(ValueError, match="give one of them"):
        discrete_schedule(euler, 1, timesteps=[5], sigmas=[1.0])
    with pytest.raises(ValueError, match="1 timesteps were given for 2 steps"):
        discrete_schedule(euler, 2, timesteps=[5])
    with pytest.raises(ValueError, match="but 7 at position 1 follows 7"):
        discrete_schedule(euler, 2, timesteps=[7, 7])
    with pytest.raises(ValueError, match="2 sigmas above 0 were given for 3 steps"):
        discrete_schedule(euler, 3, sigmas=[2.0, 1.0, 0.0])
    with pytest.raises(ValueError, match="2 at position 1 follows 1"):
        discrete_schedule(euler, 2, sigmas=[1.0, 2.0])
    with pytest.raises(ValueError, match="set spread to None"):
        discrete_schedule(replace(euler, spread="karras"), 1, timesteps=[7])
