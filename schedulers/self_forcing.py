"""The schedule of Self-Forcing's causal video models, which were distilled to 4 steps.

They begin at 1000, 750, 500 and 250 of 1000 timesteps, shifted: at a shift of 5, sigma is 1, 0.9375, 0.8333 and 0.625.
`schedules.flow_schedule` makes it; the network is told 1000 sigma, not rounded to whole timesteps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

SELF_FORCING = "SelfForcingFlowMatchScheduler"
_TABLE = {"num_inference_steps": 1000, "sigma_min": 0.0, "extra_one_step": True}
"""Of the training timesteps that shifted ones are looked up in: all whole ones."""


@dataclass(frozen=True, kw_only=True)
class SelfForcingConfig:
    """The shift, of a scheduler_config.json as FastVideo writes it.

    Raises:
        ValueError: a value that makes no schedule.
    """

    shift: float = 5.0

    def __post_init__(self) -> None:
        """Check the value."""
        if isinstance(self.shift, bool) or not 0.0 < self.shift < math.inf:
            raise ValueError(f"shift must be positive, got {self.shift}")

    @classmethod
    def from_entries(cls, entries: Mapping[str, object]) -> Self:
        """From the entries of a scheduler_config.json; a missing shift is 5.

        Raises:
            ValueError: another class, or a value that there is nothing for here.
        """
        name, shift = entries.get("_class_name"), entries.get("shift", cls.shift)
        if name != SELF_FORCING:
            raise ValueError(f"scheduler_config.json names {name!r}: supported is {SELF_FORCING}")
        for option, wanted in _TABLE.items():
            if entries.get(option, wanted) != wanted:
                raise ValueError(f"{SELF_FORCING}: {option} = {entries[option]!r} is not supported: only {wanted!r}")
        if not isinstance(shift, int | float):
            raise ValueError(f"{SELF_FORCING}: shift must be a number, got {shift!r}")
        return cls(shift=float(shift))

    def entries(self) -> dict[str, object]:
        """Those of a scheduler_config.json."""
        return {"_class_name": SELF_FORCING, "shift": self.shift, **_TABLE, "training": True}
