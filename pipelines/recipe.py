"""What a model was made for: defaults of a request, and the sizes it can make."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..schedulers import Sampler, sampler_names

MAY_BE_NONE: Mapping[str, type] = {"inpaint_strength": float, "max_frames": int}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Defaults of one model. Sizes are pixels a side; `strength` is the default for image-to-image, and for inpainting
    where `inpaint_strength` is None. `num_frames` of a clip (1: pictures, unless more are asked for), at most
    `max_frames` where that is known, and how many are shown in a second."""

    width: int = 128
    height: int = 128
    size_multiple: int = 16
    min_size: int = 32
    max_size: int = 512
    num_inference_steps: int = 10
    guidance_scale: float = 3.0
    guidance_rescale: float = 0.0
    sampler: str | Sampler = "euler"
    shift: float = 1.0
    strength: float = 0.8
    inpaint_strength: float | None = None
    num_frames: int = 1
    max_frames: int | None = None
    fps: int = 16

    @classmethod
    def from_config(cls, entries: Mapping[str, object]) -> "Recipe":
        """The recipe of a config file's entries; what is not there keeps its default.

        Raises:
            ValueError: an unknown entry, or one of the wrong type; sizes, steps or a sampler that no request could use.
        """
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls)} | dict(MAY_BE_NONE)
        unknown = sorted(set(entries) - set(kinds))
        if unknown:
            raise ValueError(f"recipe has unknown entries {', '.join(unknown)}; known are {', '.join(kinds)}")
        given = {name: value for name, value in entries.items() if not (name in MAY_BE_NONE and value is None)}
        recipe = cls(**{name: _converted(name, value, kinds[name]) for name, value in given.items()})
        recipe._check()
        return recipe

    def check_frames(self, name: str, count: int) -> int:
        """A number of frames that the model can make. ValueError: too many."""
        if self.max_frames is not None and count > self.max_frames:
            raise ValueError(f"{name} {count}; this model makes clips of up to {self.max_frames} frames")
        return count

    def check_side(self, name: str, value: int) -> int:
        """A height or width that the model can make.

        Raises:
            ValueError: out of range, or not a multiple; the message names both neighbours.
        """
        if not self.min_size <= value <= self.max_size:
            raise ValueError(f"{name} is {value}; it must be from {self.min_size} to {self.max_size}")
        if value % self.size_multiple:
            below = value - value % self.size_multiple
            above = below + self.size_multiple
            near = " or ".join(str(side) for side in (below, above) if self.min_size <= side <= self.max_size)
            raise ValueError(f"{name} is {value}; it must be a multiple of {self.size_multiple}, such as {near}")
        return value

    def _check(self) -> None:
        """Makes sure that the defaults can be used."""
        for name, value in (
            ("size_multiple", self.size_multiple),
            ("min_size", self.min_size),
            ("num_inference_steps", self.num_inference_steps),
            ("num_frames", self.num_frames),
            ("max_frames", self.max_frames),
        ):
            if value is not None and value < 1:
                raise ValueError(f"recipe's {name} is {value}; it must be at least 1")
        if not 0 <= self.strength <= 1:
            raise ValueError(f"recipe's strength is {self.strength}; it must be from 0 to 1")
        if self.sampler not in sampler_names():
            raise ValueError(f"recipe's sampler is {self.sampler!r}; it must be one of {', '.join(sampler_names())}")
        self.check_side("recipe's width", self.width)
        self.check_side("recipe's height", self.height)


def _converted(name: str, value: Any, kind: type) -> Any:
    """`value` as `kind` (a whole number is a float too)."""
    if isinstance(value, bool) or not isinstance(value, int | float if kind is float else kind):
        raise ValueError(f"recipe's {name} is {value!r}; it must be of type {kind.__name__}")
    return kind(value)
