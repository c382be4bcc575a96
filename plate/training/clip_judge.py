"""Decides whether a clip shows what its caption states: the background, the objects, and how they move.

A caption has one layout, so it is known where an object must be in each frame. There it is looked for among all 120
objects in the same pose, within `REACH` pixels, on means over 4 x 4 pixels. It is right in a frame if it is the object
that fits best there and enough of it is drawn; it moves rightly if it is never farther than `NEAR` from its place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .evaluate import gradient_energy
from .finder import Fit, agreement, explained_share, fit_backdrop, pooled
from .judge import MIN_AGREEMENT, MIN_EXPLAINED
from .motions import STEP, Actor, Clip, Pose, held_out_clip, key_frames, posed, seen_width
from .objects import object_names
from .scenes import LARGE, MEDIUM, SIDE, SMALL, Array

REACH, NEAR = 12, 8  # pixels
Clips = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class ClipVerdict:
    """What is right about one clip. `objects`: in every frame; `flicker`: the mean change of the background from frame
    to frame, of 255; `edges`: gradient energy in the objects' boxes over that of true objects, in key frames and in the
    others. `why` names the first thing that is wrong."""

    background: bool
    objects: bool
    motion: bool
    flicker: float
    edges: tuple[float, float]
    why: str

    @property
    def right(self) -> bool:
        """Whether everything is."""
        return self.background and self.objects and self.motion


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """An object in a frame: whether it is the likeliest one and well drawn, and how far from its place."""

    right: bool
    distance: int


def judge_clip(frames: Clips, clip: Clip) -> ClipVerdict:
    """A verdict on frames, uint8 [F, 128, 128, 3]: the first ones of what `clip` states."""
    pictures = frames.astype(np.float32)
    fit = fit_backdrop(pictures[0])
    background = _background_trouble(pictures, fit, clip)
    seen = [_look(picture, fit.whole, actor, n) for n, picture in enumerate(pictures) for actor in clip.actors]
    objects = "" if all(each.right for each in seen) else "other objects, or smeared"
    motion = "" if all(each.distance <= NEAR for each in seen) else "elsewhere"
    return ClipVerdict(
        background=not background,
        objects=not objects,
        motion=not motion,
        flicker=flicker(pictures, clip),
        edges=_edges(pictures, fit, clip),
        why=background or objects or motion,
    )


def held_out_clips(kind: Literal["one", "two"], count: int, seed: int = 2024) -> list[Clip]:
    """The test set: clips with a combination that training never saw, the same ones for a seed."""
    random = np.random.default_rng((seed, len(kind), count))
    return [held_out_clip(kind, random) for _ in range(count)]


def flicker(pictures: Array, clip: Clip) -> float:
    """The mean change from frame to frame, of 255, of what no object ever comes near; 0 where there is nothing."""
    free = np.ones((SIDE, SIDE), dtype=bool)
    for actor in clip.actors:
        for pose in actor.poses:
            rows, columns = (slice(max(0, at - NEAR), at + pose.size + NEAR) for at in (pose.y, pose.x))
            free[rows, columns] = False
    changes = np.abs(np.diff(pictures, axis=0))[:, free]
    return float(changes.mean()) if changes.size else 0.0


def _background_trouble(pictures: Array, fit: Fit, clip: Clip) -> str:
    if clip.background is not None and fit.name != clip.background:
        return f"background is {fit.name}"
    for n in key_frames(len(pictures)):
        free = np.ones((SIDE, SIDE), dtype=bool)
        for actor in clip.actors:
            free[_box(actor.poses[n])] = False
        if agreement(pictures[n], fit.whole, free) < MIN_AGREEMENT:
            return f"background is spoilt in frame {n}"
    return ""


def _look(picture: Array, behind: Array, actor: Actor, frame: int) -> _Seen:
    """The object in one frame, where it fits best."""
    pose = actor.poses[frame]
    places = [*_places(pose)]
    fits = [_explained(picture, behind, place, posed(actor.index, pose.size, pose.angle)[None])[0] for place in places]
    best = places[int(np.argmax(fits))]
    shares = _explained(picture, behind, best, _all_posed(pose.size, pose.angle))
    is_drawn = shares[actor.index] >= _bound(pose) and int(shares.argmax()) == actor.index
    return _Seen(right=bool(is_drawn), distance=max(abs(best.x - pose.x), abs(best.y - pose.y)))


def _places(pose: Pose) -> Iterator[Pose]:
    """The pose, moved by up to `REACH` pixels, nearest first."""
    shifts = sorted(range(-REACH, REACH + 1, STEP), key=abs)
    for down in shifts:
        for right in shifts:
            x, y = pose.x + right, pose.y + down
            if min(x, y) >= 0 and max(x, y) + pose.size <= SIDE:
                yield Pose(size=pose.size, x=x, y=y, angle=pose.angle)


def _bound(pose: Pose) -> float:
    """The least share of an object that must be drawn: that of the nearest size of pictures, by what is seen of it."""
    side = pose.size * seen_width(pose.angle) ** 0.5
    return MIN_EXPLAINED[min((SMALL, MEDIUM, LARGE), key=lambda each: abs(each - side))]


@lru_cache(maxsize=40)
def _all_posed(size: int, angle: float) -> Array:
    """Every object in one pose, [objects, size, size, 4]."""
    return np.stack([posed(index, size, angle) for index in range(len(object_names()))])


def _explained(picture: Array, behind: Array, pose: Pose, inks: Array) -> Array:
    """Of each object [N, size, size, 4], the share of what it adds to the backdrop in a box that the picture has."""
    box = _box(pose)
    added = np.clip(inks[..., :3] + (1 - inks[..., 3:]) * behind[box], 0, 255) - behind[box]
    return explained_share(pooled((picture[box] - behind[box])[None]), pooled(added.astype(np.float32)))


def _edges(pictures: Array, fit: Fit, clip: Clip) -> tuple[float, float]:
    """See `ClipVerdict`; nan where there are no such frames."""
    keys = set(key_frames(len(pictures)))
    shares: tuple[list[float], list[float]] = ([], [])
    for n, picture in enumerate(pictures):
        for actor in clip.actors:
            pose = actor.poses[n]
            box, ink = _box(pose), posed(actor.index, pose.size, pose.angle)
            true = np.clip(fit.whole[box] * (1 - ink[..., 3:]) + ink[..., :3], 0, 255)
            shares[n not in keys].append(gradient_energy(picture[box]) / max(gradient_energy(true), 1.0))
    first, second = (float(np.mean(each)) if each else float("nan") for each in shares)
    return first, second


def _box(pose: Pose) -> tuple[slice, slice]:
    return slice(pose.y, pose.y + pose.size), slice(pose.x, pose.x + pose.size)


def table(verdicts: Sequence[ClipVerdict]) -> str:
    """Shares and means over clips, as one line."""
    count = len(verdicts)
    facts = {
        "right": [v.right for v in verdicts],
        "objects": [v.objects for v in verdicts],
        "motion": [v.motion for v in verdicts],
        "background": [v.background for v in verdicts],
    }
    keys, others = (float(np.nanmean([v.edges[n] for v in verdicts])) for n in (0, 1))
    told = "  ".join(f"{name} {sum(fact) / count:.1%}" for name, fact in facts.items())
    change = float(np.mean([v.flicker for v in verdicts]))
    return f"{count} clips  {told}  flicker {change:.2f}  sharp, key frames {keys:.2f}, others {others:.2f}"
