"""What the stages of a pipeline make sure of before they compute: that they were given what they take.

Legend: N pictures, C latent channels, F frames, h w latent cells.
"""

from collections.abc import Collection, Mapping
from typing import Protocol, TypeVar, cast, runtime_checkable

from torch import Tensor

from ..denoisers.base import Conditioning

T = TypeVar("T")


@runtime_checkable
class _Event(Protocol):
    """A `threading.Event`, or that of another library, as far as it is read."""

    def is_set(self) -> bool:
        """Whether it was set."""
        ...


def check_kind(name: str, value: object, kinds: type[T] | tuple[type[T], ...], allowed: str) -> T:
    """`value`, if it is of one of the kinds.

    Raises:
        ValueError: it is not; the message says what is `allowed`.
    """
    if not isinstance(value, kinds):
        raise ValueError(f"{name} is {_shown(value)}; it must be {allowed}")
    return value


def check_cancel(cancel: object) -> None:
    """Makes sure that a run can ask whether it is cancelled. ValueError otherwise."""
    if cancel is not None and (isinstance(cancel, type) or not isinstance(cancel, _Event)):
        raise ValueError(f"cancel is {_shown(cancel)}; it must be a threading.Event")


def check_on_step(on_step: object) -> None:
    """Makes sure that steps can be given to it. ValueError otherwise."""
    if not (on_step is None or callable(on_step)):
        raise ValueError(f"on_step is {_shown(on_step)}; it must be a function that takes a step")


def check_encoders(encoders: object, roles: Collection[str]) -> None:
    """Makes sure that a pipeline has text encoders for the roles that its model cannot do without. ValueError
    otherwise."""
    found = cast(Mapping[str, object], encoders) if isinstance(encoders, Mapping) else {}
    missing = [role for role in roles if role not in found]
    if missing:
        raise ValueError(
            f"encoders has no {' and no '.join(map(repr, missing))}; this model reads prompts with {', '.join(roles)}"
        )
    for role, encoder in found.items():
        if not callable(encoder):
            raise ValueError(f"encoders[{role!r}] is {_shown(encoder)}; it must be a text encoder")


def check_conditioning(part: Conditioning) -> None:
    """Makes sure that a run can be given it: no guidance value, and lengths within its states. ValueError otherwise."""
    if part.guidance is not None:
        raise ValueError("conditioning: it holds a guidance value, which guidance_scale gives")
    for name, states, counts in (
        ("lengths", part.states, part.lengths),
        ("other_lengths", part.other_states, part.other_lengths),
    ):
        tokens, lengths = 0 if states is None else states.shape[1], [] if counts is None else counts.tolist()
        if not all(0 <= length <= tokens for length in lengths):
            raise ValueError(f"conditioning: {name} are {lengths}; its states have from 0 to {tokens} tokens a row")


def check_latents(latents: Tensor, channels: int, shape: tuple[int, ...] | None, *, clips: bool = False) -> None:
    """Makes sure that latents can be decoded: [N, C, 1, h, w] (`clips`: [N, C, F, h, w]) with nothing empty, or the
    `shape` of their run.

    Raises:
        ValueError: they have another shape.
    """
    given = tuple(latents.shape)
    if len(given) != 5 or given[1] != channels or 0 in given or (given[2] != 1 and not clips):
        frames = "F" if clips else 1
        raise ValueError(f"latents have shape {given}; expected [N, {channels}, {frames}, h, w], each at least 1")
    if shape is not None and given != shape:
        raise ValueError(f"latents have shape {given}; their run's have {shape}")


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return type(value).__name__ if isinstance(value, Tensor) or "tensor(" in text else text[:80]
