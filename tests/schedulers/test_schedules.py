import math

import pytest
import torch

from calotype.schedulers import (
    Point,
    Schedule,
    exploding_schedule,
    exploding_schedule_from_sigmas,
    exponential_shift_sigma,
    flow_schedule,
    flow_schedule_from_sigmas,
    shift_sigma,
)


def test_flow_schedule_is_linspace_then_zero() -> None:
    for n in (1, 2, 7, 28):
        schedule = flow_schedule(n)
        expected = [*torch.linspace(1, 1 / n, n, dtype=torch.float64).tolist(), 0.0]
        assert schedule.sigmas == pytest.approx(expected, abs=1e-12)
        assert schedule.num_steps == n and schedule.path == "flow"
        assert [p.index for p in schedule.points] == list(range(n + 1))
        assert all(p.alpha == 1 - p.sigma and p.time == p.sigma for p in schedule.points)
        assert schedule.sigmas[0] == 1.0 and schedule.sigmas[-1] == 0.0


def test_shift_formula_and_its_exact_ends() -> None:
    for s in (0.1, 0.3, 1.7, 3.0, 12.5):
        for sigma in (0.05, 0.5, 0.93):
            assert shift_sigma(sigma, s) == pytest.approx(s * sigma / (1 + (s - 1) * sigma), rel=1e-12)
            mu = math.log(s)
            assert exponential_shift_sigma(sigma, mu) == pytest.approx(math.exp(mu) / (math.exp(mu) + 1 / sigma - 1))
        assert shift_sigma(0.0, s) == 0.0 and shift_sigma(1.0, s) == 1.0
    assert flow_schedule(4, shift=3.0).sigmas == pytest.approx((1.0, 0.9, 0.75, 0.5, 0.0))


def test_shift_one_is_bit_identical_to_none() -> None:
    assert all(shift_sigma(i / 997, 1.0) == i / 997 for i in range(998))


def test_sigmas_are_taken_as_given() -> None:
    sigmas = [1.0, 0.99375, 0.725, 0.421875]
    assert flow_schedule_from_sigmas(sigmas).sigmas == (*sigmas, 0.0)
    assert flow_schedule_from_sigmas((0.5, 0.0)).sigmas == (0.5, 0.0)
    assert flow_schedule_from_sigmas([0.9, 0.5], shift=3.0).sigmas == pytest.approx((2.7 / 2.8, 0.75, 0.0))
    assert exploding_schedule_from_sigmas([80, 3, 0.1]).sigmas == (80.0, 3.0, 0.1, 0.0)
    assert sigmas == [1.0, 0.99375, 0.725, 0.421875]


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        ([1.0, 0.5, 0.5], "0.5 at position 2 follows 0.5"),
        ([0.3, 0.7], "0.7 at position 1 follows 0.3"),
        ([1.5, 0.5], "sigma 1.5 at position 0"),
        ([0.5, -0.1], "sigma -0.1 at position 1"),
        ([math.nan], "sigma nan at position 0"),
        ([], "at least one sigma above 0"),
        ([0.0], "at least one sigma above 0"),
    ],
)
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_bad_sigmas_are_named(sigmas: list[float], message: str, shift: float) -> None:
    with pytest.raises(ValueError, match=message):
        flow_schedule_from_sigmas(sigmas, shift)


def test_bad_exploding_sigmas_are_named() -> None:
    with pytest.raises(ValueError, match="sigma inf at position 0"):
        exploding_schedule_from_sigmas([math.inf, 1.0])
    with pytest.raises(ValueError, match="sigma -1 at position 1"):
        exploding_schedule_from_sigmas([2.0, -1.0])


@pytest.mark.parametrize("num_steps", [0, -1])
def test_too_few_steps(num_steps: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, got {num_steps}"):
        flow_schedule(num_steps)
    with pytest.raises(ValueError, match=f"at least 1, got {num_steps}"):
        exploding_schedule(num_steps)


@pytest.mark.parametrize("shift", [0.0, -2.0, math.inf, math.nan])
def test_bad_shift(shift: float) -> None:
    with pytest.raises(ValueError, match="shift must be positive"):
        flow_schedule(3, shift)


def test_karras_formula() -> None:
    schedule = exploding_schedule(5, 0.02, 10.0, rho=3.0)
    ramp = torch.linspace(0, 1, 5, dtype=torch.float64)
    low, high = 0.02 ** (1 / 3), 10.0 ** (1 / 3)
    assert schedule.sigmas == pytest.approx([*((high + ramp * (low - high)) ** 3).tolist(), 0.0])
    assert schedule.path == "exploding" and all(p.alpha == 1.0 for p in schedule.points)
    assert exploding_schedule(1, 0.02, 10.0).sigmas == pytest.approx((10.0, 0.0))


def test_bad_karras_arguments() -> None:
    with pytest.raises(ValueError, match="got 2 and 1"):
        exploding_schedule(3, 2.0, 1.0)
    with pytest.raises(ValueError, match="got 0 and 1"):
        exploding_schedule(3, 0.0, 1.0)
    with pytest.raises(ValueError, match="rho must be positive, got -1"):
        exploding_schedule(3, rho=-1.0)


def test_starting_at_keeps_the_last_steps_and_their_indices() -> None:
    schedule = flow_schedule(10)
    for strength, kept in ((1.0, 10), (0.55, 5), (0.5, 5), (0.1, 1), (0.01, 1), (0.0, 1)):
        late = schedule.starting_at(strength)
        assert late.points == schedule.points[10 - kept :]
        assert late.points[0].index == 10 - kept
    assert schedule.starting_at(1.0) == schedule
    assert schedule.num_steps == 10


@pytest.mark.parametrize("strength", [-0.1, 1.5, math.nan])
def test_bad_strength(strength: float) -> None:
    with pytest.raises(ValueError, match=rf"strength must lie in \[0, 1\], got {strength:g}"):
        flow_schedule(4).starting_at(strength)


def test_between_starts_late_and_ends_early() -> None:
    schedule = exploding_schedule(6)
    part = schedule.between(1, 4)
    assert part.points == schedule.points[1:5] and part.num_steps == 3 and part.sigmas[-1] > 0.0
    for start, stop in ((3, 3), (-1, 2), (2, 7)):
        with pytest.raises(ValueError, match=rf"steps {start}\.\.{stop}"):
            schedule.between(start, stop)


def test_noised_is_the_forward_process() -> None:
    x0, noise = torch.randn(2, 3), torch.randn(2, 3)
    flow = flow_schedule(4).starting_at(0.75).points[0]
    torch.testing.assert_close(flow.noised(x0, noise), 0.25 * x0 + 0.75 * noise)
    point = exploding_schedule(3, 0.1, 5.0).points[0]
    torch.testing.assert_close(point.noised(x0, noise), x0 + 5 * noise)
    assert torch.equal(flow_schedule(4).points[0].noised(x0, noise), noise)


def test_a_schedule_checks_itself() -> None:
    def point(i: int, sigma: float, alpha: float) -> Point:
        return Point(index=i, sigma=sigma, alpha=alpha, time=sigma)

    with pytest.raises(ValueError, match="at least two points"):
        Schedule(points=(point(0, 1.0, 0.0),), path="flow")
    with pytest.raises(ValueError, match=r"alpha at sigma 0\.5 must be 0.5 on the flow path, got 1"):
        Schedule(points=(point(0, 1.0, 0.0), point(1, 0.5, 1.0)), path="flow")
    with pytest.raises(ValueError, match="point 1 of the schedule has index 0; it must be 1"):
        Schedule(points=(point(0, 1.0, 0.0), point(0, 0.5, 0.5)), path="flow")
    with pytest.raises(ValueError, match="must be 1 on the exploding path"):
        Schedule(points=(point(0, 1.0, 0.0), point(1, 0.0, 1.0)), path="exploding")
