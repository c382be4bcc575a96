"""The schedules of diffusers' DDPM-type schedulers, for epsilon and v-prediction checkpoints (SD 1.5, SD 2, SDXL).

All are on the exploding path here, with sigma = sqrt((1 - a) / a) where a is the reference's `alphas_cumprod`. The
latents x_vp of DDIM, PNDM, LCM and DPM-Solver there are ours divided by sqrt(1 + sigma^2); those of Euler and
Euler-ancestral are ours. `Point.time` is the training timestep that the model is told, a fraction where diffusers
tells one.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch

from .base import Point, Schedule, check_sigmas
from .betas import BetaSchedule, check_betas, make_betas, train_sigmas
from .entries import Entries
from .spacing import Spread, spread_out, to_float32
from .timesteps import Spacing, dpm_timesteps, euler_timesteps, lcm_timesteps, whole_timesteps

DiscreteName = Literal[
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "DDIMScheduler",
    "PNDMScheduler",
    "DPMSolverMultistepScheduler",
    "LCMScheduler",
]
Prediction = Literal["epsilon", "v_prediction", "sample"]
FinalSigma = Literal["zero", "sigma_min"]

DISCRETE: tuple[DiscreteName, ...] = get_args(DiscreteName)
EXPLODING = ("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler")  # their latents are ours


@dataclass(frozen=True, kw_only=True)
class DiscreteConfig:
    """The options of a DDPM-type scheduler_config.json; `scheduler` is its class name.

    `final_sigma` stands for `final_sigmas_type` and for DDIM's and PNDM's `set_alpha_to_one`, `spread` for
    `use_karras_sigmas` and `use_exponential_sigmas`. What the model predicts (`prediction_type`) is the family's to
    convert; `timestep_scaling` is for the LCM sampler.

    Raises:
        ValueError: a value that makes no schedule.
    """

    scheduler: DiscreteName
    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: BetaSchedule = "linear"
    trained_betas: tuple[float, ...] | None = None
    prediction_type: Prediction = "epsilon"
    timestep_spacing: Spacing = "linspace"
    steps_offset: int = 0
    spread: Spread | None = None
    sigma_min: float | None = None
    sigma_max: float | None = None
    final_sigma: FinalSigma = "zero"
    rescale_betas_zero_snr: bool = False
    lambda_min_clipped: float = -math.inf
    original_inference_steps: int = 50
    timestep_scaling: float = 10.0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.num_train_timesteps < 1:
            raise ValueError(f"num_train_timesteps must be at least 1, got {self.num_train_timesteps}")
        if min(self.beta_start, self.beta_end) < 0:
            raise ValueError(f"betas lie between 0 and 1, got {min(self.beta_start, self.beta_end):g}")
        check_betas(self.betas())
        if self.trained_betas is not None and len(self.trained_betas) != self.num_train_timesteps:
            raise ValueError(f"{len(self.trained_betas)} trained_betas for {self.num_train_timesteps} timesteps")
        if not 0 <= self.steps_offset < self.num_train_timesteps:
            raise ValueError(f"steps_offset must lie in 0..{self.num_train_timesteps - 1}, got {self.steps_offset}")
        for sigma in (self.sigma_min, self.sigma_max):
            if sigma is not None and not 0.0 < sigma < math.inf:
                raise ValueError(f"sigma_min and sigma_max must be positive, got {sigma:g}")

    @classmethod
    def from_entries(cls, entries: Mapping[str, object]) -> Self:
        """From the entries of a scheduler_config.json; a missing option has that class's default in diffusers.

        Raises:
            ValueError: another class, an option that changes the result and that there is nothing for here, or a bad
                value.
        """
        read = Entries.of(entries, DISCRETE)
        name: DiscreteName = read.word("_class_name", DISCRETE, DISCRETE[0])
        _refuse_options(name, read)
        distilled = name == "LCMScheduler"
        has_final = name in ("EulerDiscreteScheduler", "DPMSolverMultistepScheduler")
        at_one = read.switch("set_alpha_to_one", name != "PNDMScheduler")
        betas: tuple[BetaSchedule, ...] = get_args(BetaSchedule)
        finals: tuple[FinalSigma, ...] = get_args(FinalSigma)
        return cls(
            scheduler=name,
            num_train_timesteps=read.whole("num_train_timesteps", 1000),
            beta_start=read.number("beta_start", 0.00085 if distilled else 0.0001),
            beta_end=read.number("beta_end", 0.012 if distilled else 0.02),
            beta_schedule=read.word("beta_schedule", betas, "scaled_linear" if distilled else "linear"),
            trained_betas=read.numbers("trained_betas"),
            prediction_type=read.word("prediction_type", get_args(Prediction), "epsilon"),
            timestep_spacing=read.word("timestep_spacing", get_args(Spacing), _default_spacing(name)),
            steps_offset=read.whole("steps_offset", 0),
            spread=read.spread() if has_final else None,
            sigma_min=read.optional_number("sigma_min") if name == "EulerDiscreteScheduler" else None,
            sigma_max=read.optional_number("sigma_max") if name == "EulerDiscreteScheduler" else None,
            final_sigma=read.word("final_sigmas_type", finals, "zero") if has_final else _final(name, at_one),
            rescale_betas_zero_snr=read.switch("rescale_betas_zero_snr", False) and name != "PNDMScheduler",
            lambda_min_clipped=read.number("lambda_min_clipped", -math.inf),
            original_inference_steps=read.whole("original_inference_steps", 50),
            timestep_scaling=read.number("timestep_scaling", 10.0),
        )

    def betas(self) -> list[float]:
        """One per training timestep."""
        if self.trained_betas is not None:
            return to_float32(self.trained_betas)
        count = self.num_train_timesteps
        return make_betas(self.beta_schedule, self.beta_start, self.beta_end, count).tolist()

    def train_sigmas(self) -> list[float]:
        """The noise level of every training timestep, rising."""
        betas = torch.tensor(self.betas(), dtype=torch.float32)
        return train_sigmas(betas, zero_snr=self.rescale_betas_zero_snr)


def discrete_schedule(
    config: DiscreteConfig,
    num_steps: int,
    *,
    timesteps: Sequence[float] | None = None,
    sigmas: Sequence[float] | None = None,
) -> Schedule:
    """The schedule that `set_timesteps` makes, or one at given training `timesteps` or `sigmas` (one per step).

    It ends at 0 or, where the file says so, at the lowest trained sigma. A last step of no length (from the lowest
    sigma to itself) is left out; where there is no other step, it goes to 0.
    DDIM and PNDM: each step ends at the next timestep. diffusers steps by N // n timesteps instead, which is elsewhere
    with `trailing` where n does not divide N, and with `linspace`: its latents then have another noise level than the
    model is told.

    Raises:
        ValueError: a number of steps that the scheduler has no timesteps for, both timesteps and sigmas or another
            number of them than steps, or values that do not fall or were not trained.
    """
    levels = config.train_sigmas()
    if sigmas is not None:
        if timesteps is not None:
            raise ValueError("timesteps and sigmas were both given: give one of them")
        found = _given_sigmas(sigmas, num_steps)
        return _schedule(found, _times_of(found, levels), 0.0)
    times = _timesteps(config, num_steps, levels) if timesteps is None else [float(t) for t in timesteps]
    _check_times(config, times, num_steps if timesteps is not None else len(times))
    last = 0.0 if config.final_sigma == "zero" else levels[0]
    if timesteps is None and config.scheduler in ("DDIMScheduler", "PNDMScheduler"):
        before = int(times[-1]) - config.num_train_timesteps // num_steps
        last = levels[before] if before >= 0 else last
    found = [_level(levels, t) for t in times]
    if config.spread is not None:
        if timesteps is not None:
            raise ValueError(f"timesteps were given, but the scheduler has {config.spread} sigmas: set spread to None")
        found = _spread_out(config, config.spread, found, levels)
        times = [_told(config, time) for time in _times_of(found, levels)]
    return _schedule(to_float32(found), to_float32(times), last)


def initial_noise_scale(config: DiscreteConfig, schedule: Schedule) -> float:
    """What unit noise is multiplied by where a run without a picture begins.

    sqrt(sigma^2 + 1), which is the level of a noised picture of unit variance; Euler and Euler-ancestral take sigma
    itself with `linspace` and `trailing` spacing (diffusers' `init_noise_sigma`).
    """
    sigma = schedule.points[0].sigma
    if config.scheduler in EXPLODING and config.timestep_spacing != "leading":
        return sigma
    return math.sqrt(sigma**2 + 1.0)


def final_latent_scale(config: DiscreteConfig, schedule: Schedule) -> float:
    """What the last latents are multiplied by before they are decoded: 1 at sigma 0.

    Where a schedule of DDIM or PNDM ends above 0, diffusers decodes x_vp, which is ours over sqrt(sigma^2 + 1).
    """
    return latent_scale(config, schedule.points[-1].sigma)


def latent_scale(config: DiscreteConfig, sigma: float) -> float:
    """What our latents at `sigma` are multiplied by to be diffusers' own: 1, or 1 / sqrt(sigma^2 + 1)."""
    return 1.0 if config.scheduler in EXPLODING else 1.0 / math.sqrt(sigma**2 + 1.0)


def _timesteps(config: DiscreteConfig, num_steps: int, levels: Sequence[float]) -> list[float]:
    count, spacing, offset = config.num_train_timesteps, config.timestep_spacing, config.steps_offset
    most = count - 1 if config.scheduler == "DPMSolverMultistepScheduler" else count
    if not 1 <= num_steps <= most:
        raise ValueError(f"the number of steps must lie in 1..{most}, got {num_steps}")
    if config.scheduler in EXPLODING:
        return euler_timesteps(spacing, count, num_steps, offset)
    if config.scheduler == "LCMScheduler":
        return lcm_timesteps(count, num_steps, config.original_inference_steps)
    if config.scheduler == "DPMSolverMultistepScheduler":
        kept = sum(-math.log(sigma) >= config.lambda_min_clipped for sigma in levels)
        return dpm_timesteps(spacing, count, num_steps, offset, kept)
    return whole_timesteps(spacing, count, num_steps, offset)


def _check_times(config: DiscreteConfig, times: Sequence[float], num_steps: int) -> None:
    if len(times) != num_steps:
        raise ValueError(f"{len(times)} timesteps were given for {num_steps} steps")
    for i, time in enumerate(times):
        if not 0.0 <= time <= config.num_train_timesteps - 1:
            raise ValueError(
                f"timestep {time:g} at position {i} was not trained: 0..{config.num_train_timesteps - 1} were "
                f"(num_train_timesteps; steps_offset is {config.steps_offset})"
            )
        if i > 0 and time >= times[i - 1]:
            raise ValueError(f"timesteps must fall, but {time:g} at position {i} follows {times[i - 1]:g}")


def _given_sigmas(sigmas: Sequence[float], num_steps: int) -> list[float]:
    values = [float(sigma) for sigma in sigmas]
    values = values[:-1] if values and values[-1] == 0.0 else values
    if len(values) != num_steps:
        raise ValueError(f"{len(values)} sigmas above 0 were given for {num_steps} steps")
    check_sigmas(values, "exploding")
    return to_float32(values)


def _schedule(sigmas: list[float], times: list[float], last: float) -> Schedule:
    if sigmas[-1] <= last and len(sigmas) > 1:
        rows = list(zip(sigmas, times, strict=True))
    else:
        rows = [*zip(sigmas, times, strict=True), (last if last < sigmas[-1] else 0.0, 0.0)]
    points = (Point(index=i, sigma=sigma, alpha=1.0, time=time) for i, (sigma, time) in enumerate(rows))
    return Schedule(points=tuple(points), path="exploding")


def _level(levels: Sequence[float], time: float) -> float:
    """The sigma of a training timestep, between two of them on the line through both."""
    low = min(int(time), len(levels) - 2)
    return levels[low] + (time - low) * (levels[low + 1] - levels[low])


def _times_of(sigmas: Sequence[float], levels: Sequence[float]) -> list[float]:
    """The training timestep of each sigma: linear in log sigma between two of them, the nearest end outside."""
    logs: list[float] = torch.tensor(levels, dtype=torch.float32).log().tolist()
    times: list[float] = []
    for level in map(math.log, sigmas):
        low = min(max(bisect_right(logs, level) - 1, 0), len(logs) - 2)
        times.append(low + min(max((level - logs[low]) / (logs[low + 1] - logs[low]), 0.0), 1.0))
    return times


def _spread_out(config: DiscreteConfig, spread: Spread, found: Sequence[float], levels: Sequence[float]) -> list[float]:
    """Euler spreads between the ends of what it would visit (or the config's), DPM-Solver between those of all."""
    ends = (found[0], found[-1]) if config.scheduler in EXPLODING else (levels[-1], levels[0])
    highest = ends[0] if config.sigma_max is None else config.sigma_max
    lowest = ends[1] if config.sigma_min is None else config.sigma_min
    return spread_out(spread, highest, lowest, len(found))


def _told(config: DiscreteConfig, time: float) -> float:
    """What the model is told for a fractional timestep: DPM-Solver tells whole ones."""
    if config.scheduler in EXPLODING:
        return time
    rounded = config.spread == "karras" and config.beta_schedule != "squaredcos_cap_v2"
    return float(round(time) if rounded else int(time))


def _default_spacing(name: DiscreteName) -> Spacing:
    return "leading" if name in ("DDIMScheduler", "PNDMScheduler", "LCMScheduler") else "linspace"


def _final(name: DiscreteName, at_one: bool) -> FinalSigma:
    return "sigma_min" if name in ("DDIMScheduler", "PNDMScheduler") and not at_one else "zero"


def _refuse_options(name: DiscreteName, read: Entries) -> None:
    """What the named class would take into account and what there is nothing for here."""
    if name == "EulerDiscreteScheduler":
        read.without("use_beta_sigmas")
        read.require("interpolation_type", ("linear",), "linear")
        read.require("timestep_type", ("discrete",), "discrete")
    elif name in ("DDIMScheduler", "LCMScheduler"):
        read.without("thresholding", "rescale_betas_zero_snr")  # the latter: its first sigma is infinite here
        read.require("clip_sample", (False,), name == "DDIMScheduler")
    elif name == "PNDMScheduler":
        read.require("skip_prk_steps", (True,), False)
        read.require("prediction_type", ("epsilon",), "epsilon")
    elif name == "DPMSolverMultistepScheduler":
        read.without("thresholding", "variance_type", "use_beta_sigmas", "use_lu_lambdas", "use_flow_sigmas")
        read.require("algorithm_type", ("dpmsolver++", "deis"), "dpmsolver++")  # diffusers reads deis so, too
        read.require("solver_type", ("midpoint", "logrho", "bh1", "bh2"), "midpoint")
        read.require("solver_order", (2,), 2)
        read.require("final_sigmas_type", ("zero",), "zero")
