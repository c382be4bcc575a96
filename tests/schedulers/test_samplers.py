import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from calotype.schedulers import (
    DDIM,
    DPMPP2M,
    LCM,
    PNDM,
    Euler,
    EulerAncestral,
    Heun,
    Point,
    RowNoise,
    Sampler,
    Schedule,
    State,
    UniPC,
    exploding_schedule,
    flow_schedule,
    flow_schedule_from_sigmas,
    sampler_by_name,
    sampler_names,
)

SHAPE = (2, 3, 1, 4, 4)
SAMPLERS: tuple[Sampler, ...] = (
    Euler(),
    Heun(),
    DPMPP2M(),
    EulerAncestral(),
    EulerAncestral(eta=0.4),
    DDIM(),
    DDIM(eta=0.6),
    PNDM(),
    LCM(),
    UniPC(),
    UniPC(order=3),
)
SCHEDULES = {
    "flow": flow_schedule(6, shift=2.0),
    "custom": flow_schedule_from_sigmas([1.0, 0.97, 0.6, 0.55, 0.1]),
    "late": flow_schedule(9).starting_at(0.5),
    "early": flow_schedule(9).between(0, 6),
    "exploding": exploding_schedule(6, 0.1, 5.0),
    "exploding early": exploding_schedule(8, 0.1, 5.0).between(1, 6),
}
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def denoise(x: Tensor, sigma: float) -> Tensor:
    """Some smooth nonlinear prediction of x0, elementwise."""
    return torch.tanh(x / (1 + sigma)) * 0.8 + 0.1 * math.cos(3 * sigma)


def slope(x: Tensor, point: Point) -> Tensor:
    return (x - denoise(x, point.sigma)) / point.sigma


def latents(shape: Sequence[int] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(11))


def noise(shape: Sequence[int] = SHAPE) -> RowNoise:
    return RowNoise([21 + b for b in range(shape[0])], shape)


def euler_reference(x: Tensor, sigmas: Sequence[float]) -> Tensor:
    for s, t in pairwise(sigmas):
        x = x + (x - denoise(x, s)) / s * (t - s)
    return x


def heun_reference(x: Tensor, sigmas: Sequence[float]) -> Tensor:
    for s, t in pairwise(sigmas):
        d = (x - denoise(x, s)) / s
        if t == 0:
            x = x + d * (t - s)
        else:
            x_2 = x + d * (t - s)
            x = x + (d + (x_2 - denoise(x_2, t)) / t) / 2 * (t - s)
    return x


def dpmpp_2m_reference(x: Tensor, sigmas: Sequence[float], alpha: Callable[[float], float]) -> Tensor:
    """Solved as on the exploding path in the variable x / alpha at the noise level sigma / alpha, k-diffusion's way."""
    old, y, levels = None, x / alpha(sigmas[0]), [s / alpha(s) for s in sigmas]
    for i, s in enumerate(sigmas[:-1]):
        d = denoise(y * alpha(s), s)
        if sigmas[i + 1] == 0:
            y = d
            continue
        t, t_next = -math.log(levels[i]), -math.log(levels[i + 1])
        h = t_next - t
        if old is None:
            y = levels[i + 1] / levels[i] * y - math.expm1(-h) * d
        else:
            r = (t + math.log(levels[i - 1])) / h
            y = levels[i + 1] / levels[i] * y - math.expm1(-h) * ((1 + 1 / (2 * r)) * d - 1 / (2 * r) * old)
        old = d
    return y * alpha(sigmas[-1])


def ancestral_reference(x: Tensor, sigmas: Sequence[float], eta: float, draw: Callable[[], Tensor]) -> Tensor:
    for s, t in pairwise(sigmas):
        d = denoise(x, s)
        up = min(t, eta * (t**2 * (s**2 - t**2) / s**2) ** 0.5)
        down = (t**2 - up**2) ** 0.5
        x = x + (x - d) / s * (down - s)
        if t > 0:
            x = x + draw() * up
    return x


def ancestral_flow_reference(x: Tensor, sigmas: Sequence[float], eta: float, draw: Callable[[], Tensor]) -> Tensor:
    for s, t in pairwise(sigmas):
        d = denoise(x, s)
        if t == 0:
            x = d
            continue
        down = t * (1 + (t / s - 1) * eta)
        renoise = (t**2 - down**2 * (1 - t) ** 2 / (1 - down) ** 2) ** 0.5
        x = down / s * x + (1 - down / s) * d
        x = (1 - t) / (1 - down) * x + draw() * renoise
    return x


def run(sampler: Sampler, schedule: Schedule, shape: Sequence[int] = SHAPE) -> Tensor:
    *_, last = sampler(slope, latents(shape), schedule, noise(shape))
    return last.latents


@each_schedule
def test_against_formulas_written_out(schedule: Schedule) -> None:
    x, sigmas = latents(), schedule.sigmas
    torch.testing.assert_close(run(Euler(), schedule), euler_reference(x, sigmas), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run(Heun(), schedule), heun_reference(x, sigmas), rtol=1e-5, atol=1e-5)
    for eta in (0.4, 1.0):
        reference = ancestral_flow_reference if schedule.path == "flow" else ancestral_reference
        expected = reference(x, sigmas, eta, noise().draw)
        torch.testing.assert_close(run(EulerAncestral(eta=eta), schedule), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["late", "exploding", "exploding early"])
def test_dpmpp_2m_against_k_diffusion_in_scaled_coordinates(name: str) -> None:
    schedule = SCHEDULES[name]
    alpha = (lambda sigma: 1 - sigma) if schedule.path == "flow" else (lambda sigma: 1.0)
    expected = dpmpp_2m_reference(latents(), schedule.sigmas, alpha)
    torch.testing.assert_close(run(DPMPP2M(), schedule), expected, rtol=1e-5, atol=1e-5)


def test_dpmpp_2m_at_sigma_one_is_the_limit_of_starting_just_below() -> None:
    below = flow_schedule_from_sigmas([1 - 1e-9, *SCHEDULES["custom"].sigmas[1:]])
    torch.testing.assert_close(run(DPMPP2M(), SCHEDULES["custom"]), run(DPMPP2M(), below), rtol=0.2, atol=0.2)
    first = next(iter(DPMPP2M()(slope, latents(), SCHEDULES["custom"], noise())))
    euler = next(iter(Euler()(slope, latents(), SCHEDULES["custom"], noise())))
    torch.testing.assert_close(first.latents, euler.latents)


@each_sampler
@each_schedule
def test_steps_describe_themselves(sampler: Sampler, schedule: Schedule) -> None:
    before = latents()
    for i, step in enumerate(sampler(slope, before, schedule, noise())):
        point = schedule.points[i]
        assert (step.index, step.total, step.sigma) == (i, schedule.num_steps, schedule.sigmas[i + 1])
        assert step.state.index == i + 1 and torch.equal(step.state.latents, step.latents) and step.chunk is None
        assert step.latents.dtype == torch.float32 and step.latents.isfinite().all()
        torch.testing.assert_close(step.denoised, denoise(before, point.sigma), rtol=1e-4, atol=1e-5)
        before = step.latents
    assert i + 1 == schedule.num_steps


@each_sampler
@each_schedule
def test_evaluations_are_the_points_asked_for(sampler: Sampler, schedule: Schedule) -> None:
    asked: list[Point] = []

    def recording(x: Tensor, point: Point) -> Tensor:
        asked.append(point)
        return slope(x, point)

    list(sampler(recording, latents(), schedule, noise()))
    assert tuple(dict.fromkeys(asked)) == sampler.evaluations(schedule)
    assert len({point.index for point in asked}) == len(sampler.evaluations(schedule))


@each_sampler
@each_schedule
def test_resuming_is_bit_equal(sampler: Sampler, schedule: Schedule, tmp_path: Path) -> None:
    own_noise = noise()
    x = own_noise.draw()
    steps = list(sampler(slope, x, schedule, own_noise))
    for k, saved in enumerate(steps):
        tensors = {name: tensor.clone() for name, tensor in saved.state.to_tensors().items()}
        torch.save(tensors, tmp_path / "state")
        state = State.from_tensors(torch.load(tmp_path / "state", weights_only=True))
        rest = list(replace(sampler)(slope, torch.zeros_like(x), schedule, RowNoise([0, 1], SHAPE), state))
        assert [step.index for step in rest] == list(range(k + 1, schedule.num_steps))
        for again, first in zip(rest, steps[k + 1 :], strict=True):
            assert torch.equal(again.latents, first.latents) and torch.equal(again.denoised, first.denoised)
            for name, tensor in first.state.to_tensors().items():
                assert torch.equal(again.state.to_tensors()[name], tensor), name


@each_sampler
@each_schedule
def test_a_row_of_a_batch_is_that_row_alone(sampler: Sampler, schedule: Schedule) -> None:
    whole = run(sampler, schedule)
    for b in range(SHAPE[0]):
        own_noise = RowNoise([21 + b], (1, *SHAPE[1:]))
        *_, last = sampler(slope, latents()[b : b + 1], schedule, own_noise)
        torch.testing.assert_close(last.latents[0], whole[b], rtol=1e-6, atol=1e-6)


@each_sampler
@each_schedule
def test_nothing_is_written_into(sampler: Sampler, schedule: Schedule) -> None:
    x = latents()
    kept: list[tuple[Tensor, Tensor]] = [(x, x.clone())]

    def watched(y: Tensor, point: Point) -> Tensor:
        d = slope(y, point)
        kept.extend([(y, y.clone()), (d, d.clone())])
        return d

    for step in sampler(watched, x, schedule, noise()):
        kept.extend((tensor, tensor.clone()) for tensor in (step.latents, step.denoised, *step.state.history))
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)


@each_schedule
@pytest.mark.parametrize("sampler", [EulerAncestral(eta=0.0), DDIM(eta=0.0)], ids=str)
def test_eta_zero_is_euler_bit_for_bit_and_draws_nothing(sampler: Sampler, schedule: Schedule) -> None:
    ours, theirs = noise(), noise()
    pairs = zip(
        sampler(slope, latents(), schedule, ours),
        Euler()(slope, latents(), schedule, theirs),
        strict=True,
    )
    for ancestral, euler in pairs:
        assert torch.equal(ancestral.latents, euler.latents) and torch.equal(ancestral.denoised, euler.denoised)
    assert torch.equal(ours.draw(), noise().draw())


@each_sampler
def test_one_step_gives_the_denoised(sampler: Sampler) -> None:
    for schedule in (flow_schedule(1), exploding_schedule(1), flow_schedule(5).starting_at(0.0)):
        (step,) = sampler(slope, latents(), schedule, noise())
        assert step.latents.isfinite().all() and step.sigma == 0.0
        assert torch.equal(step.latents, step.denoised)


@each_sampler
def test_other_dtypes_are_converted_once(sampler: Sampler) -> None:
    x = latents().bfloat16()
    steps = list(sampler(slope, x, flow_schedule(3), noise()))
    again = list(sampler(slope, x.float(), flow_schedule(3), noise()))
    assert all(
        torch.equal(a.latents, b.latents) and a.latents.dtype == torch.float32
        for a, b in zip(steps, again, strict=True)
    )
    assert x.dtype == torch.bfloat16


def test_a_state_that_does_not_fit_is_refused() -> None:
    schedule = flow_schedule(3)
    euler = next(iter(Euler()(slope, latents(), schedule, noise()))).state
    multistep = next(iter(DPMPP2M()(slope, latents(), schedule, noise()))).state

    def resume(sampler: Sampler, state: State, x: Tensor) -> None:
        next(iter(sampler(slope, x, schedule, noise(), state)))

    with pytest.raises(ValueError, match="1 tensors of history, this sampler keeps 0"):
        resume(Euler(), multistep, latents())
    with pytest.raises(ValueError, match="0 tensors of history, this sampler keeps 1"):
        resume(DPMPP2M(), euler, latents())
    with pytest.raises(ValueError, match=r"are \[2, 3, 1, 4, 4\], this run's are \[1, 3, 1, 4, 4\]"):
        resume(Euler(), euler, latents()[:1])
    for index in (0, 4):
        with pytest.raises(ValueError, match=rf"after step {index}, this schedule has 1\.\.3"):
            resume(Euler(), replace(euler, index=index), latents())
    with pytest.raises(ValueError, match="0 noise states for 2 rows"):
        resume(Euler(), replace(euler, noise=()), latents())


def test_tensors_that_are_no_state_are_refused() -> None:
    tensors = next(iter(DPMPP2M()(slope, latents(), flow_schedule(3), noise()))).state.to_tensors()
    assert set(tensors) == {"index", "latents", "history.0", "noise.0", "noise.1"}
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    with pytest.raises(ValueError, match=r"missing \['latents'\], unknown \['weight'\]"):
        State.from_tensors({"index": tensors["index"], "weight": tensors["latents"]})
    with pytest.raises(ValueError, match=r"unknown \['history.1'\]"):
        State.from_tensors({"history.1" if name == "history.0" else name: t for name, t in tensors.items()})


def test_samplers_by_name() -> None:
    names = ("euler", "heun", "dpmpp_2m", "euler_ancestral", "ddim", "pndm", "lcm", "unipc")
    assert sampler_names() == names
    for name in sampler_names():
        assert sampler_by_name(name).name == name
    assert sampler_by_name("euler_ancestral") == EulerAncestral(eta=1.0)
    with pytest.raises(ValueError, match=f"unknown sampler 'deis': known are {', '.join(names)}"):
        sampler_by_name("deis")


@pytest.mark.parametrize("eta", [-0.1, 1.5, math.nan])
def test_bad_eta(eta: float) -> None:
    with pytest.raises(ValueError, match=rf"eta must lie in \[0, 1\], got {eta:g}"):
        EulerAncestral(eta=eta)
