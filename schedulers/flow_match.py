"""The schedules of diffusers' FlowMatchEulerDiscreteScheduler: SD3, FLUX.1, FLUX.2, Qwen-Image, Z-Image, LTX-Video.

Sigmas are those of `scheduler.sigmas`, computed in the same order and precision. `Point.time` is sigma: what the
model is told is the family's to scale (diffusers' `timesteps` are `num_train_timesteps sigma`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from .base import Schedule, check_sigmas
from .entries import Entries
from .schedules import flow_schedule_from_sigmas
from .spacing import Spread, even, spread_out

TimeShift = Literal["exponential", "linear"]

FLOW_MATCH = "FlowMatchEulerDiscreteScheduler"


@dataclass(frozen=True, kw_only=True)
class FlowMatchConfig:
    """The options of a flow-matching scheduler_config.json, under its names.

    Sigmas are shifted by `shift`, or, with `use_dynamic_shifting`, by a mu that depends on the size (`image_mu`).
    `shift_terminal` then stretches them to end there, and `spread` puts them elsewhere between the same ends.

    Raises:
        ValueError: a value that makes no schedule.
    """

    num_train_timesteps: int = 1000
    shift: float = 1.0
    use_dynamic_shifting: bool = False
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    shift_terminal: float | None = None
    time_shift_type: TimeShift = "exponential"
    spread: Spread | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        if self.num_train_timesteps < 2:
            raise ValueError(f"num_train_timesteps must be at least 2, got {self.num_train_timesteps}")
        if not 0.0 < self.shift < math.inf:
            raise ValueError(f"shift must be positive, got {self.shift:g}")
        if not self.base_image_seq_len < self.max_image_seq_len:
            lengths = f"{self.base_image_seq_len} and {self.max_image_seq_len}"
            raise ValueError(f"base_image_seq_len must be below max_image_seq_len, got {lengths}")
        if self.shift_terminal is not None and not 0.0 < self.shift_terminal < 1.0:
            raise ValueError(f"shift_terminal must lie between 0 and 1, got {self.shift_terminal:g}")

    @classmethod
    def from_entries(cls, entries: Mapping[str, object]) -> Self:
        """From the entries of a scheduler_config.json; a missing option has diffusers' default.

        Raises:
            ValueError: another class, an option that changes the result and that there is nothing for here
                (`invert_sigmas`, `stochastic_sampling`, `use_beta_sigmas`), or a bad value.
        """
        read = Entries.of(entries, (FLOW_MATCH,))
        read.without("invert_sigmas", "stochastic_sampling", "use_beta_sigmas")
        shifts: tuple[TimeShift, ...] = get_args(TimeShift)
        return cls(
            num_train_timesteps=read.whole("num_train_timesteps", 1000),
            shift=read.number("shift", 1.0),
            use_dynamic_shifting=read.switch("use_dynamic_shifting", False),
            base_shift=read.number("base_shift", 0.5),
            max_shift=read.number("max_shift", 1.15),
            base_image_seq_len=read.whole("base_image_seq_len", 256),
            max_image_seq_len=read.whole("max_image_seq_len", 4096),
            shift_terminal=read.optional_number("shift_terminal") or None,
            time_shift_type=read.word("time_shift_type", shifts, "exponential"),
            spread=read.spread(),
        )

    def entries(self) -> dict[str, object]:
        """Those of a scheduler_config.json."""
        options = {name: value for name, value in vars(self).items() if name != "spread"}
        spread = {} if self.spread is None else {f"use_{self.spread}_sigmas": True}
        return {"_class_name": FLOW_MATCH, **options, **spread}


def flow_match_schedule(
    config: FlowMatchConfig,
    num_steps: int,
    *,
    num_image_tokens: int | None = None,
    mu: float | None = None,
    sigmas: Sequence[float] | None = None,
) -> Schedule:
    """The schedule that `set_timesteps` makes, with a final 0.

    Without `sigmas` it starts from equal steps between the ends of the *shifted* training sigmas and shifts them
    again, as diffusers does: SD3 (shift 3) ends its last step but one at sigma 0.0089 rather than 0.1 (28 steps).
    FLUX, Qwen-Image and most others pass `sigmas=even_sigmas(num_steps)`, which are shifted once.

    With dynamic shifting, mu is given or follows from `num_image_tokens`; without, neither has an effect.
    Given `sigmas` whose last is 0 make one step less than there are sigmas: Z-Image passes `even(1, 0, n)`.
    One step with `shift_terminal` keeps its sigma (diffusers divides 0 by 0): there is no last sigma to stretch to.

    Raises:
        ValueError: fewer than one step, another number of sigmas than steps, sigmas that do not fall or leave 0..1,
            dynamic shifting without a size, or with a mu that makes no shift.
    """
    if num_steps < 1:
        raise ValueError(f"the number of steps must be at least 1, got {num_steps}")
    if sigmas is not None and len(sigmas) != num_steps:
        raise ValueError(f"{len(sigmas)} sigmas were given for {num_steps} steps")
    even_or_given = _default_sigmas(config, num_steps) if sigmas is None else _given_sigmas(sigmas)
    placed = _placed(config, even_or_given, num_steps, num_image_tokens, mu).float()
    if not bool((placed[1:] < placed[:-1]).all()):  # a very strong shift takes the first ones to one float32 number
        placed = _placed(config, even_or_given.double(), num_steps, num_image_tokens, mu)
    # float32 arithmetic can leave the first one an ulp above 1
    return flow_schedule_from_sigmas(placed.clamp(max=1.0).tolist())


def even_sigmas(num_steps: int) -> list[float]:
    """1, ..., 1/n in equal steps: what the pipelines of FLUX, Qwen-Image, HunyuanVideo and LTX pass as sigmas."""
    if num_steps < 1:
        raise ValueError(f"the number of steps must be at least 1, got {num_steps}")
    return even(1.0, 1.0 / num_steps, num_steps)


def image_mu(config: FlowMatchConfig, num_image_tokens: int) -> float:
    """mu on the line through (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift), not clipped."""
    if num_image_tokens < 1:
        raise ValueError(f"num_image_tokens must be at least 1, got {num_image_tokens}")
    rise = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    return num_image_tokens * rise + (config.base_shift - rise * config.base_image_seq_len)


def flux2_mu(num_image_tokens: int, num_steps: int) -> float:
    """FLUX.2's mu: lines in the tokens fitted at 10 and at 200 steps, and a line in the steps between them.

    `compute_empirical_mu` of BFL's and diffusers' FLUX.2. Above 4300 tokens the line at 200 steps serves for all.
    """
    if num_image_tokens < 1 or num_steps < 1:
        raise ValueError(f"need at least one token and one step, got {num_image_tokens} and {num_steps}")
    at_200 = 0.00016927 * num_image_tokens + 0.45666666
    if num_image_tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * num_image_tokens + 1.89833333
    rise = (at_200 - at_10) / 190.0
    return rise * num_steps + (at_200 - 200.0 * rise)


def _placed(
    config: FlowMatchConfig, x: Tensor, num_steps: int, num_image_tokens: int | None, mu: float | None
) -> Tensor:
    """Sigmas x shifted, stretched and spread, as the config says."""
    if config.use_dynamic_shifting:
        x = _time_shifted(config, x, _mu(config, num_image_tokens, mu))
    else:
        x = _shifted(config, x)
    if config.shift_terminal is not None:
        x = _stretched(x, config.shift_terminal)
    if config.spread is not None:
        x = torch.tensor(spread_out(config.spread, float(x[0]), float(x[-1]), num_steps), dtype=torch.float64)
    return x


def _default_sigmas(config: FlowMatchConfig, num_steps: int) -> Tensor:
    """Equal steps between the ends of the training sigmas, float64; a static shift is in them already."""
    count = config.num_train_timesteps
    ends = torch.tensor([count, 1.0], dtype=torch.float32) / count
    if not config.use_dynamic_shifting:
        ends = _shifted(config, ends)
    highest, lowest = ends.tolist()
    return torch.tensor(even(highest * count, lowest * count, num_steps), dtype=torch.float64) / count


def _given_sigmas(sigmas: Sequence[float]) -> Tensor:
    values = [float(sigma) for sigma in sigmas]
    check_sigmas(values, "flow")
    return torch.tensor(values, dtype=torch.float32)


def _mu(config: FlowMatchConfig, num_image_tokens: int | None, mu: float | None) -> float:
    if mu is None:
        if num_image_tokens is None:
            raise ValueError("this scheduler shifts by the size of the picture: give num_image_tokens or mu")
        mu = image_mu(config, num_image_tokens)
    lowest = -math.inf if config.time_shift_type == "exponential" else 0.0
    if not lowest < mu < 80.0:  # e^mu is a float32
        raise ValueError(f"mu = {mu:g} makes no {config.time_shift_type} shift: allowed are {lowest:g} < mu < 80")
    return mu


def _shifted(config: FlowMatchConfig, x: Tensor) -> Tensor:
    return config.shift * x / (1 + (config.shift - 1) * x)


def _time_shifted(config: FlowMatchConfig, x: Tensor, mu: float) -> Tensor:
    """`m / (m + 1/x - 1)` with m = e^mu or mu; 0 stays 0."""
    m = torch.full_like(x, math.exp(mu) if config.time_shift_type == "exponential" else mu)
    return m / (m + (torch.ones_like(x) / x - 1))  # tensors, since torch divides a number by multiplying a reciprocal


def _stretched(x: Tensor, terminal: float) -> Tensor:
    """1 - x scaled so that the last x is `terminal`; a last x of 1 (a single step) is left as it is."""
    rest = 1 - x
    return x if rest[-1] == 0 else 1 - rest / (rest[-1] / (1 - terminal))
