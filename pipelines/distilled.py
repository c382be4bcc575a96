"""Guidance-distilled models, which are told a value, and guidance objects that are given to them (FLUX.1, FLUX.2)."""

from ..denoisers.guidance import Distilled, Guidance
from .request import Request


def check_told(request: Request, *, guided: bool) -> None:
    """Makes sure that a `Distilled` object in the request fits a model that is told a value (`guided`), or none.
    ValueError otherwise."""
    given = request.guidance
    if isinstance(given, Distilled) and (given.scale is not None) != guided:
        wanted = "a value" if guided else "no value (None)"
        raise ValueError(f"guidance is {given}; this model is told {wanted}")


def check_not_told(request: Request) -> None:
    """Makes sure that a request's guidance tells no value, for a model that is guided by two passes. ValueError
    otherwise."""
    if isinstance(request.guidance, Distilled) and request.guidance.scale is not None:
        raise ValueError(f"guidance is {request.guidance}; this model is told no value, give ClassifierFree(...)")


def with_told(given: Guidance, told: float | None) -> Guidance:
    """A request's guidance object for a model that is told `told` (None: models without such an input), unless the
    object itself says what to tell."""
    return given if isinstance(given, Distilled) or told is None else Distilled(told, then=given)
