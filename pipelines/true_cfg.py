"""`true_cfg_scale`: classifier-free guidance that begins above 1, and only with a negative prompt (FLUX.1,
Qwen-Image)."""

from .request import Request


def has_negative(request: Request) -> bool:
    """Whether a request says what to stay away from."""
    given = request.given_conditioning
    return request.negative_prompt is not None or (given is not None and given.negative is not None)


def true_cfg_warnings(request: Request, name: str, scale: float | None) -> tuple[str, ...]:
    """What the user should know about a scale given as `name`, if it is given."""
    if scale is not None and scale > 1 and not has_negative(request):
        return (f"{name} has no effect without a negative_prompt",)
    if scale is not None and scale < 1:
        return (begins_above_1(name, scale),)
    return ()


def below_1(name: str, scale: float | None) -> tuple[str, ...]:
    """What to tell of a scale, given as `name`, that does not turn guidance on, though it looks as if; 0 and 1 are how
    it is turned off."""
    return () if scale is None or scale >= 1 or scale == 0 else (begins_above_1(name, scale),)


def leads_away(name: str, scale: float) -> str:
    """What to tell of a scale, given as `name`, that is negative and works."""
    return f"{name} {scale} is negative: it leads away from the prompt"


def begins_above_1(name: str, scale: float) -> str:
    """What to tell of a scale, given as `name`, that is too small to turn guidance on."""
    return f"{name} {scale} has no effect: it begins above 1; give guidance=ClassifierFree({scale})"
