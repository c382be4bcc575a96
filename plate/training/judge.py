"""Decides whether a picture shows what its caption states: the background, the objects and how many, their place,
their size.

`Facts` say what is asked, `finder.read_pictures` what is there; `decide` compares the two. Only stated facts count.
An object must be recognisably drawn:
at least `MIN_EXPLAINED` of what it adds to the backdrop, and `MIN_DETAIL` of its finer parts, have to be in the
picture, and nothing else may be (`MAX_REMAINDER`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .captions import Facts
from .finder import Reading, Sighting, read_pictures
from .scenes import LARGE, MEDIUM, SMALL

# Bounds from autoencoder round trips of true scenes, which lose more of small sprites.
MIN_EXPLAINED = {SMALL: 0.78, MEDIUM: 0.85, LARGE: 0.9}
MIN_DETAIL = 0.0
MIN_AGREEMENT = 0.9
MAX_REMAINDER = 700.0
APART = 16.0  # pixels between centres that make an order
LEVEL = 24.0  # the most that objects in a row may differ in height
BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is right about one picture (an unstated fact is right) and what was seen. `count`: there are as many sprites
    as were asked for, whichever they are; `objects`, that they are those, implies it. `why` names the first thing that
    is wrong."""

    background: bool
    count: bool
    objects: bool
    place: bool
    size: bool
    why: str
    reading: Reading

    @property
    def right(self) -> bool:
        """Whether everything is."""
        return self.background and self.objects and self.place and self.size


def judge(pictures: NDArray[np.uint8], facts: Sequence[Facts]) -> list[Verdict]:
    """A verdict on each of the pictures, uint8 [N, 128, 128, 3]. `ValueError` where the counts differ."""
    if len(pictures) != len(facts):
        raise ValueError(f"{len(pictures)} pictures but {len(facts)} sets of facts")
    return [decide(reading, stated) for reading, stated in zip(_readings(pictures), facts, strict=True)]


def _readings(pictures: NDArray[np.uint8]) -> Iterator[Reading]:
    for start in range(0, len(pictures), BATCH):
        yield from read_pictures(pictures[start : start + BATCH])


def decide(reading: Reading, facts: Facts) -> Verdict:
    """Compare what was seen with what was asked."""
    background = _background_trouble(reading, facts)
    objects = _objects_trouble(reading, facts)
    matched = _matched(reading.sprites, facts) if not objects else ()
    place = objects or _place_trouble(matched, facts)
    size = objects or _size_trouble(matched, facts)
    return Verdict(
        background=not background,
        count=len(reading.sprites) == len(facts.objects),
        objects=not objects,
        place=not place,
        size=not size,
        why=background or objects or place or size,
        reading=reading,
    )


def is_drawn(sighting: Sighting) -> bool:
    """Whether a sprite is there recognisably, not as a smear."""
    return sighting.explained >= MIN_EXPLAINED[sighting.size] and sighting.detail >= MIN_DETAIL


def _background_trouble(reading: Reading, facts: Facts) -> str:
    if facts.background is not None and reading.background != facts.background:
        return f"background is {reading.background}"
    return "background is spoilt" if reading.agreement < MIN_AGREEMENT else ""


def _objects_trouble(reading: Reading, facts: Facts) -> str:
    if sorted(s.index for s in reading.sprites) != sorted(facts.objects):
        return "other objects"
    if not all(is_drawn(s) for s in reading.sprites):
        return "smeared"
    return "something else is there" if reading.remainder > MAX_REMAINDER else ""


def _matched(sprites: Sequence[Sighting], facts: Facts) -> tuple[Sighting, ...]:
    """The sprites in the order of the facts' objects (equal objects from left to right)."""
    left = list(sprites)
    return tuple(left.pop(next(i for i, s in enumerate(left) if s.index == index)) for index in facts.objects)


def _place_trouble(sprites: Sequence[Sighting], facts: Facts) -> str:
    centres = [s.centre for s in sprites]
    if facts.column is not None and not _in_third(centres[0][0], facts.column):
        return "wrong column"
    if facts.row is not None and not _in_third(centres[0][1], facts.row):
        return "wrong row"
    if facts.kind in ("two of", "three of"):
        return ""
    axis = {"left of": 0, "above": 1}.get(facts.relation)
    if axis is not None and any(b[axis] - a[axis] < APART for a, b in pairwise(centres)):
        return f"not {facts.relation}"
    heights = [y for _, y in centres]
    return "not in a row" if facts.kind == "row" and max(heights) - min(heights) > LEVEL else ""


def _in_third(centre: float, third: int) -> bool:
    return (centre <= 48, 48 <= centre <= 80, centre >= 80)[third]


def _size_trouble(sprites: Sequence[Sighting], facts: Facts) -> str:
    wrong = (s for s, size in zip(sprites, facts.sizes, strict=True) if size is not None and s.size != size)
    return next((f"size {s.size}" for s in wrong), "")
