"""The scenes that the bundled model is trained on: a background, one to three sprites on a 16-pixel grid, their layout.

Legend: pictures are uint8 arrays [128, 128, 3]; positions are the left and top pixel of a square sprite.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .objects import ATLAS_COLUMNS, object_names

Array = NDArray[np.float32]
SIDE = 128  # pixels of a scene
GRID = 16  # pixels of one denoiser token
SMALL, MEDIUM, LARGE = 32, 64, 96  # sprite sizes in pixels; every placement is a multiple of GRID
ATLAS_SPRITE = 96

PLAIN_COLOURS: dict[str, tuple[int, int, int]] = {
    "white": (250, 250, 250),
    "gray": (150, 150, 150),
    "black": (22, 22, 24),
    "red": (214, 48, 48),
    "orange": (250, 150, 50),
    "yellow": (252, 222, 92),
    "green": (76, 172, 80),
    "blue": (62, 108, 220),
    "purple": (138, 78, 190),
    "pink": (250, 166, 200),
}
PLACES = ("grass", "beach", "snow", "night", "sea")
BACKGROUNDS = (*PLAIN_COLOURS, *PLACES)
HORIZONS = (64, 80, 96)


@dataclass(frozen=True, kw_only=True)
class Sprite:
    """One object in a scene: its class index, its size and its left and top, in pixels."""

    index: int
    size: int
    x: int
    y: int


@dataclass(frozen=True, kw_only=True)
class Backdrop:
    """What is behind the objects: its name, where the ground begins (places only), its brightness and the seed of its
    stars."""

    name: str
    horizon: int
    tint: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A backdrop and the sprites on it, drawn in order."""

    backdrop: Backdrop
    sprites: tuple[Sprite, ...]


def render(scene: Scene) -> NDArray[np.uint8]:
    """The picture of a scene, [128, 128, 3]."""
    picture = draw_backdrop(scene.backdrop)
    for sprite in scene.sprites:
        ink = sprite_pixels(sprite.size)[sprite.index]
        box = picture[sprite.y : sprite.y + sprite.size, sprite.x : sprite.x + sprite.size]
        box *= 1 - ink[..., 3:]
        box += ink[..., :3]
    return np.clip(picture + 0.5, 0, 255).astype(np.uint8)


def token_classes(scene: Scene) -> NDArray[np.int64]:
    """Which object covers each 16-pixel token, [8, 8]; the number of objects stands for none."""
    classes = np.full((SIDE // GRID, SIDE // GRID), len(object_names()), dtype=np.int64)
    for sprite in scene.sprites:
        rows = slice(sprite.y // GRID, (sprite.y + sprite.size) // GRID)
        columns = slice(sprite.x // GRID, (sprite.x + sprite.size) // GRID)
        classes[rows, columns] = sprite.index
    return classes


def random_backdrop(name: str, random: np.random.Generator) -> Backdrop:
    """A backdrop of this name with a random horizon, brightness and stars."""
    return Backdrop(
        name=name,
        horizon=int(random.choice(HORIZONS)),
        tint=int(random.integers(-8, 9)),
        seed=int(random.integers(1 << 30)),
    )


def draw_backdrop(backdrop: Backdrop) -> Array:
    """The pixels of a backdrop, float32 in 0..255, [128, 128, 3]."""
    if backdrop.name in PLAIN_COLOURS:
        picture = np.empty((SIDE, SIDE, 3), np.float32)
        picture[:] = PLAIN_COLOURS[backdrop.name]
    else:
        picture = _DRAW_PLACE[backdrop.name](backdrop)
    return np.clip(picture + backdrop.tint, 0, 255)


@cache
def sprite_pixels(size: int) -> Array:
    """All sprites at one size: premultiplied colour in 0..255 and alpha in 0..1, [objects, size, size, 4]."""
    return np.stack([sized(atlas_sprite(index), size) for index in range(len(object_names()))])


def atlas_sprite(index: int) -> Image.Image:
    """An object's picture in the atlas, colours premultiplied."""
    row, column = divmod(index, ATLAS_COLUMNS)
    left, top = column * ATLAS_SPRITE, row * ATLAS_SPRITE
    return _atlas().crop((left, top, left + ATLAS_SPRITE, top + ATLAS_SPRITE))


def sized(sprite: Image.Image, size: int, columns: int | None = None) -> Array:
    """Premultiplied colour in 0..255 and alpha in 0..1, [size, columns, 4]; `columns` None: as many as rows."""
    width = size if columns is None else columns
    pixels = np.array(sprite.resize((width, size), Image.Resampling.LANCZOS), dtype=np.float32)
    pixels[..., 3] /= 255
    return pixels


@cache
def _atlas() -> Image.Image:
    return Image.open(Path(__file__).parent / "sprites.png").convert("RGBa")


def _colour(colour: tuple[int, int, int]) -> Array:
    return np.asarray(colour, np.float32)


def _gradient(top: tuple[int, int, int], bottom: tuple[int, int, int], rows: int) -> Array:
    ramp = np.linspace(0, 1, rows, dtype=np.float32)[:, None, None]
    column = _colour(top) * (1 - ramp) + _colour(bottom) * ramp
    return np.broadcast_to(column, (rows, SIDE, 3)).astype(np.float32)


def _bands(*bands: tuple[int, tuple[int, int, int], tuple[int, int, int]]) -> Array:
    return np.concatenate([_gradient(top, bottom, rows) for rows, top, bottom in bands])


def _dots(picture: Array, backdrop: Backdrop, rows: int, colour: tuple[int, int, int], share: float) -> None:
    """Soft dots in the middle of some 8-pixel cells of the upper `rows` pixels."""
    kernel = np.array([[0.35, 0.7, 0.35], [0.7, 1.0, 0.7], [0.35, 0.7, 0.35]], np.float32)[..., None]
    cells = np.random.default_rng(backdrop.seed).random((rows // 8, SIDE // 8)) < share
    for row, column in np.argwhere(cells):
        spot = picture[row * 8 + 3 : row * 8 + 6, column * 8 + 3 : column * 8 + 6]
        spot += kernel * (_colour(colour) - spot)


def _grass(backdrop: Backdrop) -> Array:
    sky, ground = backdrop.horizon, SIDE - backdrop.horizon
    return _bands((sky, (112, 182, 246), (206, 232, 252)), (ground, (108, 184, 76), (62, 132, 46)))


def _beach(backdrop: Backdrop) -> Array:
    sky, sand = backdrop.horizon - 16, SIDE - backdrop.horizon
    return _bands(
        (sky, (96, 176, 246), (202, 232, 252)),
        (16, (44, 140, 208), (74, 190, 214)),
        (sand, (246, 222, 158), (226, 190, 116)),
    )


def _snow(backdrop: Backdrop) -> Array:
    sky, ground = backdrop.horizon, SIDE - backdrop.horizon
    picture = _bands((sky, (138, 160, 190), (196, 210, 226)), (ground, (252, 253, 255), (220, 230, 244)))
    _dots(picture, backdrop, sky, (255, 255, 255), 0.1)
    return picture


def _night(backdrop: Backdrop) -> Array:
    sky, ground = backdrop.horizon, SIDE - backdrop.horizon
    picture = _bands((sky, (12, 14, 44), (38, 44, 96)), (ground, (24, 44, 38), (14, 26, 24)))
    _dots(picture, backdrop, sky, (255, 250, 214), 0.1)
    return picture


def _sea(backdrop: Backdrop) -> Array:
    sky, water = backdrop.horizon, SIDE - backdrop.horizon
    return _bands((sky, (92, 186, 236), (170, 222, 246)), (water, (34, 112, 190), (14, 52, 118)))


_DRAW_PLACE = {"grass": _grass, "beach": _beach, "snow": _snow, "night": _night, "sea": _sea}
