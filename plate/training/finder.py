"""Sees what is in a picture of the training world: which backdrop, and which sprites at which sizes and places.

The backdrop is the candidate with the smallest trimmed error. A sprite's score is the squared error that it explains,
`|P - B|^2 - |P - C|^2`, where `P` is the picture,
`B` the backdrop and `C` the sprite laid over it: with `R = P - B` and `D = C - B = ink - alpha B`, `2 <R, D> - <D,
D>`. Expanded, that is a few matrix products per size.
All of it is on means over 4 x 4 pixels, the finest that an 8x autoencoder reliably keeps: there even small sprites
differ enough to be told from the 119 others.

Legend: N pictures, S sprites (objects), K places (8-pixel steps), Y rows of places, s side of a box, 3 colours; pixel
values are float32 in 0..255.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from .scenes import (
    BACKGROUNDS,
    GRID,
    HORIZONS,
    LARGE,
    MEDIUM,
    PLAIN_COLOURS,
    SIDE,
    SMALL,
    Backdrop,
    draw_backdrop,
    sprite_pixels,
)

Array = NDArray[np.float32]
SIZES = (SMALL, MEDIUM, LARGE)
STEP = 8  # pixels between the places that are tried
MAX_SPRITES = 6
CANDIDATES = 8  # objects compared at full resolution in each box
POOL = 4  # full pixels per compared pixel
SEEN = 0.4  # the explained share below which there is nothing
OUTLIER = 30.0  # a pixel farther than this from the backdrop is something else
DOT_CELL = 8


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """One sprite found in a picture, and how sure that is.

    `explained` is the share of what the sprite adds to the backdrop that the picture has (1 = pixel for pixel, 0 = no
    better than nothing); `detail` is the same after blurs were taken away from
    both; `margin` is the lead of `explained` over the best other object in the same box.
    """

    index: int
    size: int
    x: int
    y: int
    explained: float
    detail: float
    margin: float

    @property
    def centre(self) -> tuple[float, float]:
        """Its middle, in pixels."""
        return self.x + self.size / 2, self.y + self.size / 2


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is in one picture: the backdrop, the share of free pixels that agree with it, the sprites, and the largest
    mean squared error
    (pooled) of a 32-pixel window once all of that is accounted for."""

    background: str
    horizon: int
    backdrop: Array  # [128, 128, 3]
    agreement: float
    sprites: tuple[Sighting, ...]
    remainder: float


@dataclass(frozen=True, kw_only=True)
class _Templates:
    """One size, pooled: `mixed` [S, 4 s s] is (ink, -alpha); the rest gives <D, D> from a backdrop's rows."""

    size: int
    mixed: Tensor  # [S, 4 s s]
    ink_square: Tensor  # [S]
    ink_alpha: Tensor  # [S, 3 s], summed along rows of pixels
    alpha_square: Tensor  # [S, s]


def read_pictures(pictures: NDArray[np.uint8]) -> list[Reading]:
    """What is in each of the pictures, uint8 [N, 128, 128, 3]."""
    if pictures.ndim != 4 or pictures.shape[1:] != (SIDE, SIDE, 3) or pictures.dtype != np.uint8:
        raise ValueError(f"expected uint8 pictures [N, {SIDE}, {SIDE}, 3], got {pictures.dtype} {list(pictures.shape)}")
    pixels = pictures.astype(np.float32)
    fits = [fit_backdrop(picture) for picture in pixels]
    smooth = np.stack([fit.smooth for fit in fits])
    scores = [_scores(pixels, smooth, _templates(size)) for size in SIZES]
    return [
        _read(picture, fit, [(score[n], energy[n]) for score, energy in scores])
        for n, (picture, fit) in enumerate(zip(pixels, fits, strict=True))
    ]


# -- backdrop


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The backdrop that fits a picture best."""

    name: str
    horizon: int
    smooth: Array  # [128, 128, 3], without dots
    whole: Array  # [128, 128, 3], with the dots that the picture has


@cache
def _candidates() -> tuple[list[tuple[str, int]], Array]:
    """Every backdrop (name, horizon) and its dotless pixels at zero tint, [candidates, 128, 3] (they vary by row
    only)."""
    keys = [
        (name, horizon) for name in BACKGROUNDS for horizon in (HORIZONS if name not in PLAIN_COLOURS else HORIZONS[:1])
    ]
    # Column 0 is never inside a dot.
    rows = np.stack(
        [draw_backdrop(Backdrop(name=name, horizon=horizon, tint=0, seed=0))[:, 0] for name, horizon in keys]
    )
    return keys, rows


def fit_backdrop(picture: Array) -> Fit:
    """The backdrop behind whatever is in a picture, float32 [128, 128, 3] in 0..255."""
    keys, rows = _candidates()
    sampled = picture[2::4, 2::4]  # misses the dots, which lie on pixels 3 to 5 of each cell of 8
    difference = sampled[None] - rows[:, 2::4, None]
    tint = _tint(difference)
    error = np.minimum(np.abs(difference - tint[:, None, None]).max(-1), OUTLIER).mean((1, 2))
    best = int(error.argmin())
    smooth = np.ascontiguousarray(np.broadcast_to(np.clip(rows[best] + tint[best], 0, 255)[:, None], picture.shape))
    name, horizon = keys[best]
    whole = _with_dots(picture, smooth, horizon) if name in ("snow", "night") else smooth
    return Fit(name=name, horizon=horizon, smooth=smooth, whole=whole)


def _tint(difference: Array) -> Array:
    """The brightness shift, per colour, of each candidate, [candidates, 3]: the median over pixels near it."""
    flat = difference.reshape(len(difference), -1, 3)
    near: NDArray[np.bool_] = np.all(np.abs(flat) < OUTLIER, axis=-1)
    tint = np.zeros((len(flat), 3), np.float32)
    for index in np.flatnonzero(near.mean(1) > 0.1):
        tint[index] = np.median(flat[index][near[index]], axis=0)
    return np.clip(tint, -14, 14)


def _with_dots(picture: Array, smooth: Array, horizon: int) -> Array:
    """The backdrop with a spot copied from the picture wherever a cell of the sky has a bright dot on smooth
    surroundings."""
    whole = smooth.copy()
    rows = horizon // DOT_CELL
    excess = (
        (picture - smooth)
        .mean(-1)[: rows * DOT_CELL]
        .reshape(rows, DOT_CELL, SIDE // DOT_CELL, DOT_CELL)
        .transpose(0, 2, 1, 3)
    )
    spot = excess[..., 3:6, 3:6].mean((-1, -2))
    around = np.concatenate(
        [np.abs(excess[..., 0, :]), np.abs(excess[..., 7, :]), np.abs(excess[..., :, 0])], axis=-1
    ).mean(-1)
    for row, column in np.argwhere((spot > 12) & (around < 10)):
        cell = np.s_[row * DOT_CELL + 1 : row * DOT_CELL + 8, column * DOT_CELL + 1 : column * DOT_CELL + 8]
        whole[cell] = picture[cell]
    return whole


# -- sprites


@cache
def _templates(size: int) -> _Templates:
    """All sprites of one size."""
    sprites = torch.from_numpy(sprite_pixels(size)).permute(0, 3, 1, 2)  # [S, 4, size, size]
    means = functional.avg_pool2d(sprites, POOL)
    ink, alpha = means[:, :3], means[:, 3]
    mixed = torch.cat([ink, -alpha[:, None]], dim=1)
    return _Templates(
        size=size,
        mixed=mixed.flatten(1).contiguous(),
        ink_square=ink.square().sum((1, 2, 3)),
        ink_alpha=(ink * alpha[:, None]).sum(-1).flatten(1),
        alpha_square=alpha.square().sum(-1),
    )


def _scores(pixels: Array, smooth: Array, templates: _Templates) -> tuple[Array, Array]:
    """Explained squared error of every sprite at every place, and the larger of <D, D> and <R, R> of the box, both
    [N, Y, Y, S]."""
    picture = functional.avg_pool2d(torch.from_numpy(pixels).permute(0, 3, 1, 2), POOL)
    backdrop = functional.avg_pool2d(torch.from_numpy(smooth).permute(0, 3, 1, 2), POOL)
    residual = picture - backdrop
    side, stride = templates.size // POOL, STEP // POOL
    stacked = torch.cat([residual, (residual * backdrop).sum(1, keepdim=True)], dim=1)
    count, places = len(pixels), (SIDE - templates.size) // STEP + 1
    patches = functional.unfold(stacked, side, stride=stride).transpose(1, 2)  # [N, K, 4 s s]
    product = (patches.reshape(-1, patches.shape[-1]) @ templates.mixed.T).view(count, places, places, -1)
    rows = backdrop[..., 0].unfold(2, side, stride).permute(0, 2, 1, 3)  # [N, Y, 3, s]; the backdrop varies by row only
    energy = (
        templates.ink_square
        - 2 * rows.flatten(2) @ templates.ink_alpha.T
        + rows.square().sum(2) @ templates.alpha_square.T
    )
    energy = energy[:, :, None]
    change = patches[..., : 3 * side * side].square().sum(-1).view(count, places, places, 1)
    return (2 * product - energy).numpy(), torch.maximum(energy, change).numpy()


def _read(picture: Array, fit: Fit, scores: list[tuple[Array, Array]]) -> Reading:
    """Choose sprites greedily; boxes of what is drawn do not overlap by more than a step."""
    best = [_best_by_place(score, energy) for score, energy in scores]
    explained = fit.whole.copy()
    found: list[Sighting] = []
    free = np.ones((SIDE, SIDE), dtype=bool)
    while len(found) < MAX_SPRITES:
        level = int(np.argmax([b.max() for b in best]))
        if best[level].max() <= 0:
            break
        row, column = np.unravel_index(int(best[level].argmax()), best[level].shape)
        best[level][row, column] = 0
        size, x, y = SIZES[level], int(column) * STEP, int(row) * STEP
        sighting = _compare(picture, explained, scores[level][0][row, column], size, x, y)
        if sighting.explained < SEEN:
            continue
        found.append(sighting)
        _lay(explained, sighting)
        free[y : y + size, x : x + size] = False
        for other, size_other in zip(best, SIZES, strict=True):
            _exclude(other, size_other, sighting)
    return Reading(
        background=fit.name,
        horizon=fit.horizon,
        backdrop=fit.whole,
        agreement=agreement(picture, fit.whole, free),
        sprites=tuple(sorted(found, key=lambda s: (s.centre[0], s.centre[1]))),
        remainder=_remainder(picture, explained),
    )


def _best_by_place(score: Array, energy: Array) -> Array:
    """How well the best sprite at each place [Y, Y] is there, 0 where none is.

    The share that the score has of all there is to explain counts too, or a large shape over two small ones would go
    first.
    """
    share = score / energy.clip(1)
    return np.where(share > SEEN, score * share**4, 0).max(-1)


def _exclude(best: Array, size: int, sighting: Sighting) -> None:
    """Rule out the places of this size that overlap a found box by more than a step both ways."""
    low = -size + STEP, sighting.size - STEP
    steps = np.arange(len(best)) * STEP
    rows = (steps - sighting.y > low[0]) & (steps - sighting.y < low[1])
    columns = (steps - sighting.x > low[0]) & (steps - sighting.x < low[1])
    best[np.ix_(rows, columns)] = 0


def _box(sprite: Sighting | tuple[int, int, int]) -> tuple[slice, slice]:
    x, y, size = (sprite.x, sprite.y, sprite.size) if isinstance(sprite, Sighting) else sprite
    return slice(y, y + size), slice(x, x + size)


def _lay(picture: Array, sighting: Sighting) -> None:
    box, ink = _box(sighting), sprite_pixels(sighting.size)[sighting.index]
    picture[box] = np.clip(picture[box] * (1 - ink[..., 3:]) + ink[..., :3], 0, 255)


def _compare(picture: Array, behind: Array, score: Array, size: int, x: int, y: int) -> Sighting:
    """The best of the likeliest objects in one box, compared at full resolution."""
    likeliest = np.argsort(score)[-CANDIDATES:]
    box = _box((x, y, size))
    ink = sprite_pixels(size)[likeliest]
    over = np.clip(ink[..., :3] + (1 - ink[..., 3:]) * behind[box], 0, 255)
    added: Array = (over - behind[box]).astype(np.float32)  # [candidates, s, s, 3]
    residual = picture[box] - behind[box]
    explained = explained_share(pooled(residual[None]), pooled(added))
    order = np.argsort(explained)
    best = order[-1]
    detail = explained_share(_sharp(residual[None]), _sharp(added[best : best + 1]))
    return Sighting(
        index=int(likeliest[best]),
        size=size,
        x=x,
        y=y,
        explained=float(explained[best]),
        detail=float(detail[0]),
        margin=float(explained[best] - explained[order[-2]]),
    )


def explained_share(residual: Array, added: Array) -> Array:
    """1 - |R - D|^2 / |D|^2 over the last three axes."""
    return 1 - np.square(residual - added).sum((-1, -2, -3)) / np.square(added).sum((-1, -2, -3)).clip(1)


def pooled(pixels: Array) -> Array:
    """Means of [N, s, s, 3] over 4 x 4."""
    count, side = len(pixels), pixels.shape[1] // POOL
    return pixels.reshape(count, side, POOL, side, POOL, 3).mean((2, 4))


def _sharp(pixels: Array) -> Array:
    """Pixels [N, s, s, 3] less their mean over 7 x 7."""
    channels = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    blurred = functional.avg_pool2d(functional.pad(channels, (3, 3, 3, 3), mode="replicate"), 7, stride=1)
    return (channels - blurred).permute(0, 2, 3, 1).numpy()


def agreement(picture: Array, backdrop: Array, free: NDArray[np.bool_]) -> float:
    """The share of the pixels outside the found boxes that agree with the backdrop."""
    near = np.abs(picture - backdrop).max(-1) < OUTLIER
    return float(near[free].mean()) if free.any() else 1.0


def _remainder(picture: Array, explained: Array) -> float:
    """The largest mean squared difference over a 32-pixel window on the grid."""
    square = np.square(pooled((picture - explained)[None])[0]).mean(-1)
    cells = square.reshape(SIDE // GRID, GRID // POOL, SIDE // GRID, GRID // POOL).mean((1, 3))
    windows = (cells[:-1, :-1] + cells[1:, :-1] + cells[:-1, 1:] + cells[1:, 1:]) / 4
    return float(windows.max())
