"""Samplers on the exact flow of Gaussian data N(m, s^2): order of convergence, and what re-noising leaves."""

import math
from collections.abc import Callable
from dataclasses import dataclass

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
    Path,
    Point,
    RowNoise,
    Sampler,
    Schedule,
    UniPC,
    exploding_schedule_from_sigmas,
    flow_schedule,
)
from calotype.schedulers.samplers.euler_ancestral import ancestral_step

PATHS: tuple[Path, ...] = ("flow", "exploding")


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    path: Path
    mean: float = 0.7
    spread: float = 0.5

    def variance(self, point: Point) -> float:
        return point.alpha**2 * self.spread**2 + point.sigma**2

    def slope(self, x: Tensor, point: Point) -> Tensor:
        """E[dx/dsigma | x] in float64, from E[noise | x] and E[x0 | x]."""
        offset = (x.double() - point.alpha * self.mean) / self.variance(point)
        noise, x0 = point.sigma * offset, self.mean + point.alpha * self.spread**2 * offset
        return (noise - x0 if self.path == "flow" else noise).float()

    def exact(self, x: Tensor, start: Point, end: Point) -> Tensor:
        """The ODE keeps (x - alpha m) / sqrt(v)."""
        scale = math.sqrt(self.variance(end) / self.variance(start))
        return end.alpha * self.mean + scale * (x.double() - start.alpha * self.mean)


def final(sampler: Sampler, data: Gaussian, x: Tensor, schedule: Schedule, seed: int = 0) -> Tensor:
    noise = RowNoise([seed + b for b in range(x.shape[0])], x.shape)
    *_, last = sampler(data.slope, x, schedule, noise)
    return last.latents


def to_zero(n: int, path: Path) -> Schedule:
    return flow_schedule(n) if path == "flow" else exploding_schedule_from_sigmas([2 * (n - i) / n for i in range(n)])


def ended_early(n: int, path: Path) -> Schedule:
    """Equal steps in lambda = log(alpha / sigma), between two fixed sigmas inside the path."""
    top, low = (0.95, 0.1) if path == "flow" else (3.0, 0.6)
    first, last = (math.log((1 - s) / s if path == "flow" else 1 / s) for s in (top, low))
    levels = [first + (last - first) * i / n for i in range(n + 1)]
    sigmas = [1 / (1 + math.exp(level)) if path == "flow" else math.exp(-level) for level in levels]
    alphas = [1 - s if path == "flow" else 1.0 for s in sigmas]
    points = (Point(index=i, sigma=s, alpha=a, time=s) for i, (s, a) in enumerate(zip(sigmas, alphas, strict=True)))
    return Schedule(points=tuple(points), path=path)


def order(sampler: Sampler, path: Path, schedules: Callable[[int, Path], Schedule], counts: tuple[int, ...]) -> float:
    """The slope of log(error) over log(1/n), by least squares."""
    data, errors = Gaussian(path=path), []
    x = torch.randn(1, 2, 1, 4, 4, generator=torch.Generator().manual_seed(1)) * (1.0 if path == "flow" else 3.0)
    for n in counts:
        schedule = schedules(n, path)
        exact = data.exact(x, schedule.points[0], schedule.points[-1])
        errors.append(float((final(sampler, data, x, schedule) - exact).norm() / exact.norm()))
    log_n = torch.tensor(counts).double().log()
    log_e = torch.tensor(errors, dtype=torch.float64).log()
    centred = log_n - log_n.mean()
    return float(-(centred * (log_e - log_e.mean())).sum() / (centred**2).sum())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("sampler", "expected"),
    [(Euler(), 1), (EulerAncestral(eta=0.0), 1), (DDIM(), 1), (Heun(), 2), (DPMPP2M(), 2), (PNDM(), 2)],
)
def test_order_of_convergence(sampler: Sampler, expected: int, path: Path) -> None:
    assert order(sampler, path, ended_early, (32, 64, 128)) == pytest.approx(expected, abs=0.15)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("sampler", "expected"), [(UniPC(order=1), 2), (UniPC(), 3)])
def test_the_correction_gains_an_order(sampler: Sampler, expected: int, path: Path) -> None:
    """With fewer steps than above: the error of more is that of float32."""
    assert order(sampler, path, ended_early, (16, 32, 64)) == pytest.approx(expected, abs=0.15)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("sampler", "expected"), [(Euler(), 1), (Heun(), 2)])
def test_order_holds_from_pure_noise_to_sigma_zero(sampler: Sampler, expected: int, path: Path) -> None:
    assert order(sampler, path, to_zero, (32, 64, 128)) == pytest.approx(expected, abs=0.15)


@pytest.mark.parametrize("path", PATHS)
def test_dpmpp_2m_stays_second_order_up_to_a_logarithm_at_the_singular_ends(path: Path) -> None:
    """Equal steps in sigma are lambda steps of log((k + 1) / k) next to sigma = 0 at any n: an error of h^2 log n."""
    assert 1.5 < order(DPMPP2M(), path, to_zero, (128, 256, 512)) < 2.1


@pytest.mark.parametrize("path", PATHS)
def test_second_order_beats_first(path: Path) -> None:
    data, schedule, x = Gaussian(path=path), to_zero(32, path), torch.linspace(-2, 2, 16).reshape(1, 1, 1, 4, 4)
    exact = data.exact(x, schedule.points[0], schedule.points[-1])
    error = {s.name: float((final(s, data, x, schedule) - exact).norm()) for s in (Euler(), Heun(), DPMPP2M())}
    assert error["heun"] < 0.3 * error["euler"] and error["dpmpp_2m"] < 0.3 * error["euler"]


def test_point_data_is_reached_in_any_number_of_steps() -> None:
    """With s = 0 the denoiser is exact, so every solver lands on m, from one step up."""
    data, x = Gaussian(path="flow", spread=0.0), torch.randn(2, 1, 1, 2, 2)
    for sampler in (Euler(), Heun(), DPMPP2M(), EulerAncestral(), DDIM(eta=0.5), PNDM(), LCM(), UniPC()):
        for n in (1, 2, 3, 10):
            torch.testing.assert_close(final(sampler, data, x, flow_schedule(n)), torch.full_like(x, 0.7))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_renoising_ends_each_step_at_the_next_point(path: Path, eta: float) -> None:
    for _, p, q in to_zero(12, path).steps():
        down, scale, up = ancestral_step(p, q, eta, path)
        assert (scale * down) ** 2 + up**2 == pytest.approx(q.sigma**2, abs=1e-12)
        assert scale * (1 - down if path == "flow" else 1.0) == pytest.approx(q.alpha)
        assert 0 <= down <= q.sigma and (up > 0) == (q.sigma > 0)


def predicted_variances(data: Gaussian, schedule: Schedule, eta: float) -> list[float]:
    """A step is linear in x and adds up^2, so the variance after each follows from the one before, in plain numbers."""
    variance, variances = data.variance(schedule.points[0]), []
    for _, p, q in schedule.steps():
        down, scale, up = ancestral_step(p, q, eta, schedule.path)
        gain = (p.sigma - (p.alpha * data.spread**2 if schedule.path == "flow" else 0.0)) / data.variance(p)
        variance = (scale * (1 + (down - p.sigma) * gain)) ** 2 * variance + up**2
        variances.append(variance)
    return variances


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_renoising_has_the_predicted_spread_and_mean_at_every_step(path: Path, eta: float) -> None:
    data, schedule, shape = Gaussian(path=path), to_zero(25, path), (1, 1, 1, 160, 160)
    noise = RowNoise([4], shape)
    x = schedule.points[0].noised(data.mean + data.spread * noise.draw(), noise.draw())
    variances = predicted_variances(data, schedule, eta)
    for step in EulerAncestral(eta=eta)(data.slope, x, schedule, noise):
        point, deviation = schedule.points[step.index + 1], math.sqrt(variances[step.index])
        assert float(step.latents.std()) == pytest.approx(deviation, rel=0.02)  # 4.5 standard errors of 25,600 samples
        assert float(step.latents.mean()) == pytest.approx(point.alpha * data.mean, abs=0.03 * deviation)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_renoising_ends_with_the_data_s_variance(path: Path, eta: float) -> None:
    """To first order in the step, at the end and at every point before."""
    data, errors = Gaussian(path=path), []
    for n in (200, 400, 800):
        schedule = to_zero(n, path)
        found = predicted_variances(data, schedule, eta)
        true = [data.variance(point) for point in schedule.points[1:]]
        errors.append(max(abs(a / b - 1) for a, b in zip(found, true, strict=True)))
        assert found[-1] == pytest.approx(data.spread**2, rel=0.05)
    assert errors[2] < 0.03 and errors[0] / errors[1] > 1.8 and errors[1] / errors[2] > 1.8


@pytest.mark.parametrize("path", PATHS)
def test_eta_decides_how_much_of_the_start_is_forgotten(path: Path) -> None:
    data, schedule, shape = Gaussian(path=path), to_zero(100, path), (1, 1, 1, 80, 80)
    start = schedule.points[0]

    def memory(eta: float) -> float:
        noise = RowNoise([4], shape)
        x = start.noised(data.mean + data.spread * noise.draw(), noise.draw())
        *_, last = EulerAncestral(eta=eta)(data.slope, x, schedule, noise)
        return float(torch.corrcoef(torch.stack([x.flatten(), last.latents.flatten()]))[0, 1])

    assert memory(0.0) > 0.999 and memory(0.0) > memory(0.3) > memory(1.0)
    # eta = 1 samples the posterior of x0: as much correlation as the data has with its noised version
    assert memory(1.0) == pytest.approx(start.alpha * data.spread / math.sqrt(data.variance(start)), abs=0.06)
