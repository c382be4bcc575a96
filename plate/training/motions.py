"""Clips of moving scenes, and the words that describe them.

A clip has 17 frames: the first, and four groups of four; the last frame of each group is a key frame, like the first.
Objects move evenly from key frame to key frame, 4 pixels a frame, and grow from a small to a large size of pictures in
two groups, so that key frames show them where and as large as pictures do. One that spins turns about its upright axis,
has one picture on both sides and is half as thick as wide; key frames show it whole or from the side, and that tells
that it spins. (Seen thinner than in the key frames before and after, it could not be drawn between them.)
Every caption has one layout: one object crosses half of the scene, grows, shrinks, bounces or spins in its middle; of
two, each has its half.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .captions import background_words, has_held_out_pair, noun_of, training_sample
from .objects import object_names, with_article
from .scenes import (
    BACKGROUNDS,
    GRID,
    LARGE,
    MEDIUM,
    SIDE,
    SMALL,
    Array,
    Backdrop,
    atlas_sprite,
    draw_backdrop,
    random_backdrop,
    sized,
    sprite_pixels,
)

Motion = Literal["left", "right", "up", "down", "grow", "shrink", "bounce", "spin", "still"]
GROUP = 4  # frames from key frame to key frame
FRAMES = 17
STEP = 4  # pixels a frame
GROWTH = 8  # pixels of a side, a frame
TURN = 15.0  # degrees a frame: at key frames an object is whole (0, 180) or half as wide (60, 120, 240)
THICKNESS = 0.5  # of an object's width: what is seen of it from the side
ONE = ("left", "right", "up", "down", "grow", "shrink", "bounce", "spin")
RESHAPED: tuple[Motion, ...] = ("grow", "shrink", "spin")
ACROSS, ALONG = ("left", "right"), ("up", "down")  # what two objects do: above each other, beside each other
KIND_SHARES = {"one": 0.66, "two": 0.22, "still": 0.12}

_VERBS: dict[str, tuple[str, ...]] = {
    "left": ("moves left", "moves to the left", "goes left", "slides to the left", "runs to the left"),
    "right": ("moves right", "moves to the right", "goes right", "slides to the right", "runs to the right"),
    "up": ("moves up", "goes up", "jumps up", "flies up", "rises"),
    "down": ("moves down", "goes down", "falls down", "falls", "sinks"),
    "grow": ("grows", "gets bigger", "becomes bigger"),
    "shrink": ("shrinks", "gets smaller", "becomes smaller"),
    "bounce": ("bounces", "jumps up and down", "hops"),
    "spin": ("spins", "turns around", "rotates"),
}


@dataclass(frozen=True, kw_only=True)
class Pose:
    """A sprite in one frame: its size, its left and top, in pixels, and how far it is turned about its upright axis, in
    degrees."""

    size: int
    x: int
    y: int
    angle: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Actor:
    """An object, what it does, and its pose in each frame."""

    index: int
    motion: Motion
    poses: tuple[Pose, ...]


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A backdrop, and who moves on it; `background` is the stated one, None where the caption states none."""

    backdrop: Backdrop
    actors: tuple[Actor, ...]
    caption: str
    background: str | None


def training_clip(random: np.random.Generator) -> Clip:
    """A random clip in which no pair is held out (see `captions`)."""
    while True:
        clip = random_clip(str(random.choice([*KIND_SHARES], p=[*KIND_SHARES.values()])), random)
        if not _is_held_out(clip):
            return clip


def training_pair(random: np.random.Generator) -> Clip:
    """One of two objects."""
    while True:
        clip = random_clip("two", random)
        if not _is_held_out(clip):
            return clip


def reshaped_clip(random: np.random.Generator, motions: Sequence[Motion] = RESHAPED) -> Clip:
    """A clip for training in which one object grows, shrinks or turns, which pictures do not tell."""
    while True:
        clip = random_clip("one", random)
        if clip.actors[0].motion in motions and not _is_held_out(clip):
            return clip


def held_out_clip(kind: Literal["one", "two"], random: np.random.Generator) -> Clip:
    """A random clip with a pair that is held out, whose caption states its background."""
    while True:
        clip = random_clip(kind, random)
        if clip.background is not None and _is_held_out(clip):
            return clip


def random_clip(kind: str, random: np.random.Generator) -> Clip:
    """A clip of "one" object, of "two", or of a "still" scene."""
    return _MAKE[kind](random)


def render_clip(clip: Clip, frames: Sequence[int] = range(FRAMES)) -> NDArray[np.uint8]:
    """Those frames of a clip, [F, 128, 128, 3]."""
    backdrop = draw_backdrop(clip.backdrop)
    pictures = np.repeat(backdrop[None], len(frames), axis=0)
    for picture, frame in zip(pictures, frames, strict=True):
        for actor in clip.actors:
            lay(picture, actor.index, actor.poses[frame])
    return np.clip(pictures + 0.5, 0, 255).astype(np.uint8)


def lay(picture: Array, index: int, pose: Pose) -> None:
    """Draws an object over the picture, in place."""
    ink = posed(index, pose.size, pose.angle)
    box = picture[pose.y : pose.y + pose.size, pose.x : pose.x + pose.size]
    box *= 1 - ink[..., 3:]
    box += ink[..., :3]


def key_frames(num_frames: int = FRAMES) -> range:
    """The first frame, and the last one of each group."""
    return range(0, num_frames, GROUP)


def clip_classes(clip: Clip, frame: int) -> NDArray[np.int64]:
    """Which object covers at least half of each token of a frame, [8, 8]; the number of objects stands for none."""
    classes = np.full((SIDE // GRID, SIDE // GRID), len(object_names()), dtype=np.int64)
    for actor in clip.actors:
        pose = actor.poses[frame]
        width = round(seen_width(pose.angle) * pose.size)
        rows, columns = _covered(pose.y, pose.size), _covered(pose.x + (pose.size - width) // 2, width)
        classes[rows, columns] = actor.index
    return classes


@lru_cache(maxsize=8192)
def posed(index: int, size: int, angle: float) -> Array:
    """A sprite of any even size, turned: premultiplied colour in 0..255 and alpha in 0..1, [size, size, 4]."""
    if angle == 0 and size in (SMALL, MEDIUM, LARGE):
        return sprite_pixels(size)[index]
    columns = 2 * round(seen_width(angle) * size / 2)
    pixels = np.zeros((size, size, 4), dtype=np.float32)
    pixels[:, (size - columns) // 2 : (size + columns) // 2] = sized(atlas_sprite(index), size, columns)
    return pixels


def seen_width(angle: float) -> float:
    """What is seen of an object's width where it is turned, 1 for all."""
    return max(THICKNESS, abs(math.cos(math.radians(angle))))


def poses_of(motion: Motion, x: int, y: int) -> tuple[Pose, ...]:
    """The poses in all frames of an object of middle size; `x` and `y` are where it stands on the axis that it does not
    move along."""
    travel = FRAMES - 1
    if motion in ("grow", "shrink"):
        sizes = [min(SMALL + GROWTH * n, LARGE) for n in range(FRAMES)]
        sizes = sizes if motion == "grow" else sizes[::-1]
        return tuple(Pose(size=size, x=(SIDE - size) // 2, y=(SIDE - size) // 2) for size in sizes)
    if motion == "spin":
        return tuple(Pose(size=MEDIUM, x=x, y=y, angle=TURN * n % 360) for n in range(FRAMES))
    if motion == "bounce":
        heights = [SIDE - MEDIUM - STEP * min(n, travel - n) for n in range(FRAMES)]
        return tuple(Pose(size=MEDIUM, x=x, y=height) for height in heights)
    if motion == "still":
        return (Pose(size=MEDIUM, x=x, y=y),) * FRAMES
    places = [STEP * n for n in range(FRAMES)]
    places = places[::-1] if motion in ("left", "up") else places
    if motion in ACROSS:
        return tuple(Pose(size=MEDIUM, x=place, y=y) for place in places)
    return tuple(Pose(size=MEDIUM, x=x, y=place) for place in places)


def _covered(start: int, size: int) -> slice:
    """The tokens along an axis of which a box covers at least half."""
    half = GRID // 2
    return slice((start + half) // GRID, (start + size + half) // GRID)


def _one(random: np.random.Generator) -> Clip:
    index = int(random.integers(len(object_names())))
    motion: Motion = ONE[random.integers(len(ONE))]
    middle = (SIDE - MEDIUM) // 2
    actor = Actor(index=index, motion=motion, poses=poses_of(motion, middle, middle))
    return _described((actor,), _does(index, motion, random), random)


def _two(random: np.random.Generator) -> Clip:
    """One above the other, each moving across, or one beside the other, each moving along."""
    first, second = (int(n) for n in random.choice(len(object_names()), size=2, replace=False))
    choices = ACROSS if random.random() < 0.5 else ALONG
    motions = [choices[n] for n in random.integers(2, size=2)]
    places = ((0, 0), (0, SIDE - MEDIUM)) if choices is ACROSS else ((0, 0), (SIDE - MEDIUM, 0))
    actors = tuple(
        Actor(index=index, motion=motion, poses=poses_of(motion, x, y))
        for index, motion, (x, y) in zip((first, second), motions, places, strict=True)
    )
    words = " and ".join(_does(actor.index, actor.motion, random) for actor in actors)
    return _described(actors, words, random)


def _still(random: np.random.Generator) -> Clip:
    """A scene of the pictures, in which nothing moves."""
    sample = training_sample(random)
    actors = tuple(
        Actor(index=s.index, motion="still", poses=(Pose(size=s.size, x=s.x, y=s.y),) * FRAMES)
        for s in sample.scene.sprites
    )
    return Clip(
        backdrop=sample.scene.backdrop, actors=actors, caption=sample.caption, background=sample.facts.background
    )


def _described(actors: tuple[Actor, ...], words: str, random: np.random.Generator) -> Clip:
    name = BACKGROUNDS[random.integers(len(BACKGROUNDS))]
    stated = name if random.random() < 0.9 else None
    return Clip(
        backdrop=random_backdrop(name, random),
        actors=actors,
        caption=words if stated is None else f"{words} {background_words(stated, random)}",
        background=stated,
    )


def _does(index: int, motion: Motion, random: np.random.Generator) -> str:
    """An object and its verb, which agree in number."""
    who, verb = with_article(noun_of(index, random)), str(random.choice(_VERBS[motion]))
    if who.startswith(("a ", "an ")):
        return f"{who} {verb}"
    first, *rest = verb.split()
    return " ".join((who, _of_many(first), *rest))


def _of_many(verb: str) -> str:
    """The verb of several subjects: "go" of "goes"."""
    for ending, plural in (("ies", "y"), ("oes", "o"), ("s", "")):
        if verb.endswith(ending):
            return verb.removesuffix(ending) + plural
    return verb


def _is_held_out(clip: Clip) -> bool:
    return has_held_out_pair(tuple(actor.index for actor in clip.actors), clip.backdrop.name)


_MAKE: dict[str, Callable[[np.random.Generator], Clip]] = {"one": _one, "two": _two, "still": _still}
