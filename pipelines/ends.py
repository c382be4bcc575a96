"""How a model's runs begin and end: on which path, from how much noise, and in which units latents go out and come in.

Legend: N pictures, C latent channels, h w latent cells.
"""

from dataclasses import dataclass
from typing import Protocol

from ..schedulers import DiscreteConfig, Path, Schedule, initial_noise_scale, latent_scale


class Ends(Protocol):
    """Both ends of the runs of one model; immutable."""

    @property
    def path(self) -> Path:
        """The path that its schedules are on."""
        ...

    def noise_scale(self, schedule: Schedule) -> float:
        """What unit noise is multiplied by where a run without a picture begins."""
        ...

    def unit(self, sigma: float) -> float:
        """What latents at `sigma` are multiplied by where they leave a run, to be decoded or handed on."""
        ...

    def part(self, schedule: Schedule, start: float | None, end: float | None) -> Schedule:
        """The steps from the share `start` of the training time (None: the first) to the share `end` (None: the last).

        Raises:
            ValueError: no step is left, or the model's runs cannot be divided.
        """
        ...


@dataclass(frozen=True)
class FlowEnds:
    """Flow matching: latents go from noise to data, and are always what they are."""

    @property
    def path(self) -> Path:
        """`flow`."""
        return "flow"

    def noise_scale(self, schedule: Schedule) -> float:
        """The first sigma."""
        return schedule.points[0].sigma

    def unit(self, sigma: float) -> float:
        """1."""
        return 1.0

    def part(self, schedule: Schedule, start: float | None, end: float | None) -> Schedule:
        """All of it."""
        if start is not None or end is not None:
            raise ValueError("denoising_start and denoising_end: runs of this model cannot be divided")
        return schedule


@dataclass(frozen=True)
class DiscreteEnds:
    """DDPM-type models: latents are scaled where the scheduler that their checkpoint names says so."""

    config: DiscreteConfig

    @property
    def path(self) -> Path:
        """`exploding`."""
        return "exploding"

    def noise_scale(self, schedule: Schedule) -> float:
        """See `initial_noise_scale`."""
        return initial_noise_scale(self.config, schedule)

    def unit(self, sigma: float) -> float:
        """See `latent_scale`."""
        return latent_scale(self.config, sigma)

    def part(self, schedule: Schedule, start: float | None, end: float | None) -> Schedule:
        """The steps whose times are below that of `start`, and not below that of `end`, rounded as diffusers does."""
        times = [point.time for point in schedule.points[:-1]]
        first = 0 if start is None else sum(time >= self._time(start) for time in times)
        stop = len(times) if end is None or end >= 1 else sum(time >= self._time(end) for time in times)
        if first >= stop:
            shares = f"denoising_start {start} and denoising_end {end}"
            raise ValueError(f"{shares} leave none of the {len(times)} steps; take more steps, or other shares")
        return schedule.between(first, stop)

    def _time(self, share: float) -> int:
        count = self.config.num_train_timesteps
        return round(count - share * count)
