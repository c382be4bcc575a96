"""What flow-matching families share: schedules that depend on the picture's size, and their ends."""

from collections.abc import Callable, Sequence

from ..schedulers import Schedule
from ..schedulers.flow_match import FlowMatchConfig, even_sigmas, flow_match_schedule
from .family import num_steps
from .recipe import Recipe
from .request import Request


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
