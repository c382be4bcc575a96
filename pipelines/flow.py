"""What flow-matching families share: schedules that depend on the picture's size, and their ends."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..schedulers import Schedule
from ..schedulers.flow_match import FlowMatchConfig, even_sigmas, flow_match_schedule
from .family import num_steps
from .recipe import Recipe
from .request import Request
from .text_options import options_given

CELLS_PER_TOKEN = 4  # two rows of two


@dataclass(frozen=True, kw_only=True)
class FlowFamily:
    """What families of pictures choose alike whose steps are shifted by the number of picture tokens."""

    scheduler: FlowMatchConfig

    @property
    def draws_posterior(self) -> bool:
        """As the reference does."""
        return True

    def schedule(self, request: Request, recipe: Recipe, num_cells: int) -> Schedule:
        """Equal steps, or the given sigmas, shifted as the scheduler's config says, by the size where it does."""
        return size_shifted_schedule(self.scheduler, request, recipe, num_cells // CELLS_PER_TOKEN)

    def late(self, schedule: Schedule, strength: float) -> Schedule:
        """All but the first `int(n - n strength)` steps."""
        return late_steps(schedule, strength)

    def described(self, request: Request) -> Mapping[str, Any]:
        """The length, where it is given."""
        return options_given(request, "max_sequence_length")


def size_shifted_schedule(
    scheduler: FlowMatchConfig,
    request: Request,
    recipe: Recipe,
    num_tokens: int,
    *,
    mu: Callable[[int, int], float] | None = None,
) -> Schedule:
    """Equal steps, or the given sigmas, shifted as the scheduler's config says, by the number of picture tokens where
    it does: by its own line, or by the family's `mu` of the tokens and the steps."""
    sigmas = even_sigmas(num_steps(request, recipe)) if request.sigmas is None else without_zero(request.sigmas)
    shift = None if mu is None else mu(num_tokens, len(sigmas))
    return flow_match_schedule(scheduler, len(sigmas), num_image_tokens=num_tokens, mu=shift, sigmas=sigmas)


def late_steps(schedule: Schedule, strength: float) -> Schedule:
    """All but the first `int(n - n strength)` steps, as image-to-image pipelines of diffusers count them; at least
    one."""
    n = schedule.num_steps
    skipped = int(max(n - min(n * strength, n), 0))
    return schedule.between(min(skipped, n - 1), n)


def without_zero(sigmas: Sequence[float]) -> list[float]:
    """Given sigmas, a step's each: a 0 at the end, which schedules add themselves, is left out."""
    return [float(sigma) for sigma in (sigmas[:-1] if len(sigmas) > 1 and sigmas[-1] == 0 else sigmas)]
