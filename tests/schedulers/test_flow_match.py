"""Flow-matching schedules against diffusers' FlowMatchEulerDiscreteScheduler."""

import math
from typing import Any

import numpy
import pytest
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from calotype.schedulers import (
    Euler,
    FlowMatchConfig,
    Schedule,
    even_sigmas,
    flow_match_schedule,
    flow_schedule,
    flux2_mu,
    image_mu,
    sampler_for,
)

NAME = "FlowMatchEulerDiscreteScheduler"
STATIC: dict[str, dict[str, Any]] = {
    "plain": {},
    "sd3": {"shift": 3.0},
    "odd": {"shift": 1.15, "num_train_timesteps": 900},
    "terminal": {"shift": 2.3, "shift_terminal": 0.07},
    "karras": {"shift": 3.0, "use_karras_sigmas": True},
    "exponential": {"shift": 0.6, "use_exponential_sigmas": True},
}
DYNAMIC: dict[str, dict[str, Any]] = {
    "flux": {"use_dynamic_shifting": True, "shift": 3.0},
    "qwen": {"use_dynamic_shifting": True, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02},
    "ltx": {
        "use_dynamic_shifting": True,
        "base_shift": 0.95,
        "max_shift": 2.05,
        "base_image_seq_len": 1024,
        "shift_terminal": 0.1,
    },
    "linear": {"use_dynamic_shifting": True, "time_shift_type": "linear", "use_karras_sigmas": True},
}
COUNTS = (1, 2, 4, 28)


def entries(options: dict[str, Any]) -> dict[str, Any]:
    return {"_class_name": NAME, "_diffusers_version": "0.42.0", **options}


def config(options: dict[str, Any]) -> FlowMatchConfig:
    return FlowMatchConfig.from_entries(entries(options))


def reference(options: dict[str, Any], n: int, **arguments: Any) -> FlowMatchEulerDiscreteScheduler:
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(options)
    scheduler.set_timesteps(n, **arguments)
    return scheduler


def check(schedule: Schedule, scheduler: FlowMatchEulerDiscreteScheduler) -> None:
    assert schedule.path == "flow" and schedule.num_steps == len(scheduler.timesteps)
    assert schedule.sigmas == pytest.approx(scheduler.sigmas.tolist(), abs=1e-6)
    times = [point.time * scheduler.config.num_train_timesteps for point in schedule.points[:-1]]
    assert times == pytest.approx(scheduler.timesteps.tolist(), rel=1e-6)


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("options", STATIC.values(), ids=STATIC)
def test_static_shift(options: dict[str, Any], n: int) -> None:
    if n > 1 or "shift_terminal" not in options:
        check(flow_match_schedule(config(options), n), reference(options, n))
        check(flow_match_schedule(config(options), n, sigmas=even_sigmas(n)), reference(options, n, sigmas=linspace(n)))


@pytest.mark.parametrize("num_tokens", [256, 1023, 4096, 9000])
@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("options", DYNAMIC.values(), ids=DYNAMIC)
def test_dynamic_shift(options: dict[str, Any], n: int, num_tokens: int) -> None:
    ours = config(options)
    lengths = ours.base_image_seq_len, ours.max_image_seq_len
    mu = calculate_shift(num_tokens, *lengths, ours.base_shift, ours.max_shift)
    assert image_mu(ours, num_tokens) == pytest.approx(mu, rel=1e-12)
    if n > 1 or "shift_terminal" not in options:
        check(flow_match_schedule(ours, n, num_image_tokens=num_tokens), reference(options, n, mu=mu))
        given = flow_match_schedule(ours, n, num_image_tokens=num_tokens, sigmas=even_sigmas(n))
        check(given, reference(options, n, sigmas=linspace(n), mu=mu))
        check(flow_match_schedule(ours, n, mu=0.3), reference(options, n, mu=0.3))


def linspace(n: int) -> Any:
    return numpy.linspace(1.0, 1 / n, n)


@pytest.mark.parametrize("n", COUNTS)
def test_sigmas_are_the_reference_s_to_the_bit(n: int) -> None:
    """So that a model that multiplies them by 1000 is told the same time."""
    mu = image_mu(config(DYNAMIC["flux"]), 3600)
    schedule = flow_match_schedule(config(DYNAMIC["flux"]), n, mu=mu, sigmas=even_sigmas(n))
    assert schedule.sigmas == tuple(reference(DYNAMIC["flux"], n, sigmas=linspace(n), mu=mu).sigmas.tolist())
    sd3 = flow_match_schedule(config(STATIC["sd3"]), n)
    assert sd3.sigmas == tuple(reference(STATIC["sd3"], n).sigmas.tolist())


def test_the_default_path_shifts_twice_and_given_sigmas_once() -> None:
    sd3 = config(STATIC["sd3"])
    assert flow_match_schedule(sd3, 28).sigmas[-2] == pytest.approx(0.0089286, abs=1e-6)
    given = flow_match_schedule(sd3, 28, sigmas=even_sigmas(28))
    assert given.sigmas == pytest.approx(flow_schedule(28, shift=3.0).sigmas, abs=1e-6)
    assert given.sigmas[-2] == pytest.approx(0.1)


@pytest.mark.parametrize("options", [STATIC["terminal"], DYNAMIC["qwen"], DYNAMIC["ltx"]])
def test_one_step_with_a_terminal_is_finite_where_the_reference_is_not(options: dict[str, Any]) -> None:
    for sigmas in (None, [1.0]):
        schedule = flow_match_schedule(config(options), 1, num_image_tokens=4096, sigmas=sigmas)
        assert schedule.sigmas == (1.0, 0.0)
        mu = {"mu": 0.7} if options.get("use_dynamic_shifting") else {}
        with numpy.errstate(all="ignore"):
            assert math.isnan(reference(options, 1, sigmas=sigmas, **mu).sigmas[0])
    late = flow_match_schedule(config(options), 1, num_image_tokens=4096, sigmas=[0.6])
    assert late.sigmas == pytest.approx((options["shift_terminal"], 0.0), abs=1e-6)


@pytest.mark.parametrize("n", [2, 9, 28])
def test_z_image_s_last_sigma_is_zero(n: int) -> None:
    """Its pipeline sets `scheduler.sigma_min = 0`: the last of its n steps goes from 0 to 0, ours is not there."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.sigma_min = 0.0
    scheduler.set_timesteps(n)
    sigmas = [1 - i / (n - 1) for i in range(n)]
    schedule = flow_match_schedule(config(STATIC["sd3"]), n, sigmas=sigmas)
    assert schedule.num_steps == n - 1
    assert [*schedule.sigmas, 0.0] == pytest.approx(scheduler.sigmas.tolist(), abs=1e-6)


@pytest.mark.parametrize("num_tokens", [256, 4096, 4300, 4301, 16384])
@pytest.mark.parametrize("n", [1, 4, 10, 50, 200])
def test_flux2_mu(num_tokens: int, n: int) -> None:
    assert flux2_mu(num_tokens, n) == pytest.approx(compute_empirical_mu(num_tokens, n), rel=1e-12)


def test_a_static_scheduler_ignores_the_size() -> None:
    sd3 = config(STATIC["sd3"])
    assert flow_match_schedule(sd3, 4, num_image_tokens=99, mu=2.0) == flow_match_schedule(sd3, 4)


def test_sampler_for() -> None:
    sampler, schedules = sampler_for(entries(DYNAMIC["qwen"]))
    assert sampler == Euler()
    expected = flow_match_schedule(config(DYNAMIC["qwen"]), 5, num_image_tokens=777, sigmas=even_sigmas(5))
    assert schedules(5, num_image_tokens=777, sigmas=even_sigmas(5)) == expected


def test_defaults_are_the_reference_s() -> None:
    theirs = FlowMatchEulerDiscreteScheduler().config
    for name, value in vars(FlowMatchConfig.from_entries({"_class_name": NAME})).items():
        assert name == "spread" or theirs[name] == value
    foreign = {"skip_prk_steps": True, "beta_start": 0.1, "clip_sample": False, "use_karras_sigmas": None}
    assert config(foreign) == FlowMatchConfig()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"_class_name": "UniPCMultistepScheduler"}, "names 'UniPCMultistepScheduler': supported are Flow"),
        ({"_class_name": None}, "names no _class_name"),
        ({"invert_sigmas": True}, "invert_sigmas = True is not supported"),
        ({"stochastic_sampling": True}, "stochastic_sampling = True is not supported"),
        ({"use_beta_sigmas": True}, "use_beta_sigmas = True is not supported"),
        ({"use_karras_sigmas": True, "use_exponential_sigmas": True}, "are both on"),
        ({"shift_terminals": 0.1}, "unknown option 'shift_terminals' = 0.1 .nearest: shift_terminal."),
        ({"shift": "3"}, "shift must be a number, got '3'"),
        ({"shift": 0}, "shift must be positive, got 0"),
        ({"shift_terminal": 1.0}, "shift_terminal must lie between 0 and 1, got 1"),
        ({"use_dynamic_shifting": 1}, "use_dynamic_shifting must be true or false, got 1"),
        ({"time_shift_type": "cubic"}, "time_shift_type must be one of exponential, linear, got 'cubic'"),
        ({"max_image_seq_len": 256}, "below max_image_seq_len, got 256 and 256"),
        ({"num_train_timesteps": 1}, "at least 2, got 1"),
        ({"num_train_timesteps": 9.5}, "num_train_timesteps must be a whole number, got 9.5"),
    ],
)
def test_bad_entries(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlowMatchConfig.from_entries(entries({}) | options)


def test_bad_arguments() -> None:
    dynamic, linear = config(DYNAMIC["flux"]), config(DYNAMIC["linear"])
    with pytest.raises(ValueError, match="at least 1, got 0"):
        flow_match_schedule(dynamic, 0, mu=1.0)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        even_sigmas(0)
    with pytest.raises(ValueError, match="give num_image_tokens or mu"):
        flow_match_schedule(dynamic, 4)
    with pytest.raises(ValueError, match="3 sigmas were given for 4 steps"):
        flow_match_schedule(dynamic, 4, mu=1.0, sigmas=[1.0, 0.5, 0.2])
    with pytest.raises(ValueError, match=r"0\.5 at position 1 follows 0.5"):
        flow_match_schedule(dynamic, 2, mu=1.0, sigmas=[0.5, 0.5])
    with pytest.raises(ValueError, match="mu = nan makes no exponential shift"):
        flow_match_schedule(dynamic, 4, mu=math.nan)
    with pytest.raises(ValueError, match="mu = -1 makes no linear shift: allowed are 0 < mu < 80"):
        flow_match_schedule(linear, 4, mu=-1.0)
    with pytest.raises(ValueError, match="num_image_tokens must be at least 1, got 0"):
        flow_match_schedule(dynamic, 4, num_image_tokens=0)
    with pytest.raises(ValueError, match="got 5 and 0"):
        flux2_mu(5, 0)
