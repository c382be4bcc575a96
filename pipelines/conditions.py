"""Pictures and clips that a clip shows at given frames, as users give them and manifests keep them."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from .pictures import opened, opened_clips
from .values import is_int, is_number, plain

if TYPE_CHECKING:
    from .arguments import Clips, PictureLists, Pictures
    from .request import Request

SHOWN = ("image", "video")


@dataclass(frozen=True, kw_only=True, eq=False)
class Condition:
    """A picture (`image`) or a clip (`video`) that clips show from frame `frame_index` on: one for all of them, one per
    prompt, or one per clip, as `Request` takes them.

    `strength`, from 0 (nothing of it) to 1 (as it is): what lies between is made anew from where its noise is the rest
    to 1.

    Raises:
        ValueError: no picture and no clip, or both; a number out of range.
    """

    image: "Pictures | PictureLists | None" = None
    video: "Clips | None" = None
    frame_index: int = 0
    strength: float = 1.0

    def __post_init__(self) -> None:
        for name in ("frame_index", "strength"):
            object.__setattr__(self, name, plain(vars(self)[name]))
        if (self.image is None) == (self.video is None):
            found = "neither" if self.image is None else "both"
            raise ValueError(f"a condition has {found} of image and video; it takes one of the two")
        if not (is_int(self.frame_index) and self.frame_index >= 0):
            raise ValueError(f"frame_index is {self.frame_index!r}; it must be a whole number from 0 on")
        if not (is_number(self.strength) and 0 <= self.strength <= 1):
            raise ValueError(f"strength is {self.strength!r}; it must be from 0 to 1")

    @property
    def shown(self) -> object:
        """The picture or the clip."""
        return self.video if self.image is None else self.image

    def opened(self) -> "Condition":
        """The same with what its files hold in their place. Errors as for `open_image` and `read_clip`."""
        return dataclasses.replace(self, image=opened(self.image), video=opened_clips(self.video))

    def described(self) -> dict[str, Any]:
        """What a manifest keeps beside a digest of what is shown."""
        kind = SHOWN[self.image is None]
        return {"shows": kind, "frame_index": self.frame_index, "strength": float(self.strength)}


def with_conditions(request: "Request") -> "Request":
    """The request with its conditions' pictures and clips in place of their files, so that each of these is read once.

    Raises:
        ValueError, FileNotFoundError: no file of a picture or a clip.
    """
    given = request.given_conditions
    return dataclasses.replace(request, conditions=[each.opened() for each in given]) if given else request


def conditions_again(extra: Mapping[str, Any] | None, shown: object) -> tuple[Condition, ...]:
    """The conditions that a manifest's `extra` describes, which show what is given again, in their order; files are
    read.

    Raises:
        ValueError: another number than the run had, or something else than `described` wrote. FileNotFoundError: no
        such file.
    """
    described = cast(Sequence[Mapping[str, Any]], (extra or {}).get("conditions") or ())
    given = cast(Sequence[object], shown if isinstance(shown, list | tuple) else (shown,))
    if len(given) != len(described):
        raise ValueError(
            f"conditions holds {len(given)} pictures and clips; that run was given {len(described)}, in their order"
        )
    return tuple(_again(told, each).opened() for told, each in zip(described, given, strict=True))


def _again(described: Mapping[str, Any], shown: object) -> Condition:
    try:
        kind, where = described["shows"], {name: described[name] for name in ("frame_index", "strength")}
    except (KeyError, TypeError):
        raise ValueError(f"not a manifest: conditions holds {described!r}") from None
    if kind not in SHOWN:
        raise ValueError(f"not a manifest: a condition shows {kind!r}, expected {' or '.join(SHOWN)}")
    return Condition(**{kind: cast(Any, shown)}, **where)
