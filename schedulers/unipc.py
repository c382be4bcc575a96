"""The schedules of diffusers' UniPCMultistepScheduler for flow models: Wan.

Sigmas are those of `scheduler.sigmas`, computed in the same order and precision. `Point.time` is what the scheduler
says of them, `timesteps / num_train_timesteps`: whole training timesteps, rounded down.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from .base import Point, Schedule, check_sigmas
from .entries import Entries
from .spacing import even, to_float32

UNIPC = "UniPCMultistepScheduler"

_SOLVERS = ("bh2", "midpoint", "heun", "logrho")  # diffusers takes the last three for the first
_NEAR_ONE = 1e-6  # what diffusers takes off sigma 1, where lambda would be infinite


@dataclass(frozen=True, kw_only=True)
class UniPCConfig:
    """The options of a UniPC scheduler_config.json of a flow model, under its names.

    Sigmas are shifted by `flow_shift`: 3 for Wan at 480p, 5 at 720p, 8 in ComfyUI. `solver_order` is the sampler's.

    Raises:
        ValueError: a value that makes no schedule.
    """

    num_train_timesteps: int = 1000
    flow_shift: float = 1.0
    solver_order: int = 2

    def __post_init__(self) -> None:
        """Check the values."""
        if self.num_train_timesteps < 2:
            raise ValueError(f"num_train_timesteps must be at least 2, got {self.num_train_timesteps}")
        if not 0.0 < self.flow_shift < math.inf:
            raise ValueError(f"flow_shift must be positive, got {self.flow_shift:g}")
        if self.solver_order < 1:
            raise ValueError(f"solver_order must be at least 1, got {self.solver_order}")

    @classmethod
    def from_entries(cls, entries: Mapping[str, object]) -> Self:
        """From the entries of a scheduler_config.json; a missing option has diffusers' default.

        Raises:
            ValueError: another class, a model that predicts no flow, an option that changes the result and that there
                is nothing for here, or a bad value.
        """
        read = Entries.of(entries, (UNIPC,))
        read.require("prediction_type", ("flow_prediction",), "epsilon")
        read.require("use_flow_sigmas", (True,), False)
        read.require("predict_x0", (True,), True)
        read.require("lower_order_final", (True,), True)  # without, and to sigma 0, diffusers divides by 0
        read.require("final_sigmas_type", ("zero",), "zero")
        read.require("solver_type", _SOLVERS, "bh2")
        read.without("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_dynamic_shifting")
        read.without("shift_terminal", "thresholding", "disable_corrector", "solver_p")
        return cls(
            num_train_timesteps=read.whole("num_train_timesteps", 1000),
            flow_shift=read.number("flow_shift", 1.0),
            solver_order=read.whole("solver_order", 2),
        )

    def entries(self) -> dict[str, object]:
        """Those of a scheduler_config.json."""
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
        return {"_class_name": UNIPC, **vars(self), **flow}


def unipc_schedule(config: UniPCConfig, num_steps: int, *, sigmas: Sequence[float] | None = None) -> Schedule:
    """The schedule that `set_timesteps` makes, with a final 0: equal steps from 1 towards 1 / num_train_timesteps, or
    the given `sigmas`, shifted.

    Raises:
        ValueError: fewer than one step, another number of sigmas than steps, or sigmas that do not fall, leave 0..1 or
            end at 0.
    """
    if num_steps < 1:
        raise ValueError(f"the number of steps must be at least 1, got {num_steps}")
    if sigmas is not None and len(sigmas) != num_steps:
        raise ValueError(f"{len(sigmas)} sigmas were given for {num_steps} steps")
    count = config.num_train_timesteps
    placed = even(1.0, 1.0 / count, num_steps + 1)[:-1] if sigmas is None else [float(sigma) for sigma in sigmas]
    check_sigmas(placed, "flow")
    if placed[-1] == 0.0:
        raise ValueError("the last of the given sigmas is 0, which is added after them: leave it out")
    shifted = [config.flow_shift * sigma / (1 + (config.flow_shift - 1) * sigma) for sigma in placed]
    if abs(shifted[0] - 1.0) < _NEAR_ONE:
        shifted[0] -= _NEAR_ONE
    times = [*(math.floor(sigma * count) / count for sigma in shifted), 0.0]
    pairs = zip(to_float32([*shifted, 0.0]), times, strict=True)
    points = (Point(index=i, sigma=sigma, alpha=1.0 - sigma, time=time) for i, (sigma, time) in enumerate(pairs))
    return Schedule(points=tuple(points), path="flow")
