"""Layouts with the words that describe them: what the language model reads and what the judge later checks.

A `Sample` is a scene, its caption, and the facts that the caption states (`Facts`).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .objects import object_names, with_article
from .scenes import BACKGROUNDS, LARGE, MEDIUM, PLAIN_COLOURS, SIDE, SMALL, Scene, Sprite, random_backdrop

Kind = Literal["one", "two", "row", "two of", "three of"]
KINDS: tuple[Kind, ...] = ("one", "two", "row", "two of", "three of")
KIND_SHARES = (0.36, 0.38, 0.12, 0.08, 0.06)
Relation = Literal["left of", "above", "none"]

_PLACE_PHRASES: dict[str, tuple[str, ...]] = {
    "grass": (
        "on the grass",
        "on grass",
        "in the grass",
        "on a green field",
        "in a field",
        "in a meadow",
        "on a lawn",
        "in a park",
    ),
    "beach": ("on a beach", "on the beach", "at the beach", "on the sand", "on a sandy beach", "at a beach"),
    "snow": ("in the snow", "on the snow", "on snow", "in winter", "on a snowy day", "in a snowy field"),
    "night": (
        "at night",
        "in the night",
        "under the stars",
        "under a starry sky",
        "on a starry night",
        "at night under the stars",
    ),
    "sea": ("in the sea", "in the ocean", "at sea", "in the water", "on the water", "in the middle of the ocean"),
}
_PLAIN_PHRASES = (
    "on a {} background",
    "on a {} background",
    "against a {} background",
    "on {}",
    "with a {} background",
    "in front of a {} wall",
)
_COLOUR_WORDS = {"gray": ("gray", "grey"), "purple": ("purple", "violet")}
_SIZE_WORDS: dict[int, tuple[str, ...]] = {
    SMALL: ("small", "little", "tiny"),
    MEDIUM: (),
    LARGE: ("big", "large", "huge", "giant"),
}
_OPENINGS = (
    "a picture of ",
    "a drawing of ",
    "an image of ",
    "an emoji of ",
    "a photo of ",
    "an illustration of ",
    "a painting of ",
)
_COLUMN_WORDS = (("on the left",), ("in the middle", "in the center"), ("on the right",))
_ROW_WORDS = (("at the top",), ("in the middle", "in the center"), ("at the bottom",))
_CORNERS = {(0, 0): "top left", (2, 0): "top right", (0, 2): "bottom left", (2, 2): "bottom right"}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a caption states, and so what a picture must show.

    `objects` are class indices in reading order (left to right, top to bottom); `column` and `row` (0, 1, 2) are the
    stated place of a single object, None where unstated; `background` is None where unstated; `sizes` are stated sizes
    in pixels, None where unstated.
    """

    kind: Kind
    objects: tuple[int, ...]
    relation: Relation
    background: str | None
    column: int | None
    row: int | None
    sizes: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One training or test example."""

    scene: Scene
    caption: str
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class _Arrangement:
    sprites: tuple[Sprite, ...]
    relation: Relation
    words: str
    column: int | None = None
    row: int | None = None
    sizes: tuple[int | None, ...]


def is_held_out(first: int, second: int | str) -> bool:
    """Whether a pair of objects, or an object and a background, is kept for the test: a tenth of each, in any order."""
    if isinstance(second, str):
        return (first * 7919 + BACKGROUNDS.index(second) * 104729 + 13) % 10 == 0
    low, high = sorted((first, second))
    return low != high and (low * 7919 + high * 15485863 + 7) % 10 == 0


def has_held_out_pair(objects: tuple[int, ...], background: str) -> bool:
    """Whether anything in a scene is kept for the test."""
    by_place = any(is_held_out(index, background) for index in objects)
    return by_place or any(is_held_out(a, b) for i, a in enumerate(objects) for b in objects[i + 1 :])


def training_sample(random: np.random.Generator) -> Sample:
    """A random example in which no pair is held out."""
    while True:
        kind = KINDS[random.choice(len(KINDS), p=KIND_SHARES)]
        sample = random_sample(kind, random)
        if not has_held_out_pair(sample.facts.objects, sample.scene.backdrop.name):
            return sample


def held_out_sample(kind: Kind, random: np.random.Generator, *, sizes: tuple[int, ...] | None = None) -> Sample:
    """A random example of one kind in which a pair is held out: (object, background) for one object or "two X",
    (object, object) for the rest.

    `sizes`, where given, are the sizes that a scene must have in any order (the large + small pairs).
    """
    while True:
        sample = random_sample(kind, random)
        objects, background = sample.facts.objects, sample.scene.backdrop.name
        if sizes is not None and sorted(s.size for s in sample.scene.sprites) != sorted(sizes):
            continue
        if kind in ("one", "two of", "three of"):
            if sample.facts.background is not None and is_held_out(objects[0], background):
                return sample
        elif any(is_held_out(a, b) for i, a in enumerate(objects) for b in objects[i + 1 :]):
            return sample


def random_sample(kind: Kind, random: np.random.Generator) -> Sample:
    """A random example of one kind, held out or not."""
    background = BACKGROUNDS[random.integers(len(BACKGROUNDS))]
    arrangement = _ARRANGE[kind](random)
    stated = bool(random.random() < 0.9)
    return Sample(
        scene=Scene(backdrop=random_backdrop(background, random), sprites=arrangement.sprites),
        caption=_caption(arrangement.words, background if stated else None, random),
        facts=Facts(
            kind=kind,
            objects=tuple(s.index for s in arrangement.sprites),
            relation=arrangement.relation,
            background=background if stated else None,
            column=arrangement.column,
            row=arrangement.row,
            sizes=arrangement.sizes,
        ),
    )


def nouns_in(sample: Sample) -> tuple[str, ...]:
    """The words that a caption uses for its objects, in the caption's order; one plural where it counts them."""
    found: dict[str, int] = {}
    padded = f" {sample.caption} ".replace(",", " ")
    for index in dict.fromkeys(sample.facts.objects):
        entry = object_names()[index]
        words = (entry.plural,) if sample.facts.kind in ("two of", "three of") else (entry.name, *entry.synonyms)
        used = max((w for w in words if f" {w} " in padded), key=len)
        found[used] = padded.index(f" {used} ")
    return tuple(sorted(found, key=lambda noun: found[noun]))


def background_in(sample: Sample) -> str | None:
    """The words that a caption uses for its background, None where it states none."""
    background = sample.facts.background
    if background is None:
        return None
    if background in _PLACE_PHRASES:
        return max((phrase for phrase in _PLACE_PHRASES[background] if phrase in sample.caption), key=len)
    colours = _COLOUR_WORDS.get(background, (background,))
    words = (phrase.format(colour) for phrase in _PLAIN_PHRASES for colour in colours)
    used = [w for w in (word.replace("a orange", "an orange") for word in words) if sample.caption.endswith(w)]
    return max(used, key=len) if used else f"on {sample.caption.split()[-2]}"


def noun_of(index: int, random: np.random.Generator) -> str:
    """The name of an object or, one time in four, a synonym."""
    entry = object_names()[index]
    if entry.synonyms and random.random() < 0.25:
        return str(random.choice(entry.synonyms))
    return entry.name


def _caption(words: str, background: str | None, random: np.random.Generator) -> str:
    if random.random() < 0.15:
        words = str(random.choice(_OPENINGS)) + words
    if background is None:
        return words
    if background not in PLAIN_COLOURS:
        phrase = background_words(background, random)
        return f"{phrase}, {words}" if random.random() < 0.06 else f"{words} {phrase}"
    colour = _colour_word(background, random)
    if random.random() < 0.15:
        return f"{words}, {colour} background"
    return f"{words} {_plain_phrase(colour, random)}"


def background_words(background: str, random: np.random.Generator) -> str:
    """One of the phrases that say where something is."""
    if background in _PLACE_PHRASES:
        return str(random.choice(_PLACE_PHRASES[background]))
    return _plain_phrase(_colour_word(background, random), random)


def _colour_word(background: str, random: np.random.Generator) -> str:
    return str(random.choice(_COLOUR_WORDS.get(background, (background,))))


def _plain_phrase(colour: str, random: np.random.Generator) -> str:
    return str(random.choice(_PLAIN_PHRASES)).format(colour).replace("a orange", "an orange")


def _sized(index: int, size: int, state_size: bool, random: np.random.Generator) -> tuple[str, int | None]:
    """The words for one object and the size that they state."""
    noun = noun_of(index, random)
    words = _SIZE_WORDS[size]
    if not state_size or not words:
        return with_article(noun), None
    return f"a {random.choice(words)} {noun}", size


def _one(random: np.random.Generator) -> _Arrangement:
    """A single object fills the middle; one that is small, or has a stated place, is small or medium."""
    index = int(random.integers(len(object_names())))
    size = int(random.choice((LARGE, MEDIUM, SMALL), p=(0.6, 0.16, 0.24)))
    state_size = size == SMALL or bool(random.random() < 0.3)
    words, stated = _sized(index, size, state_size, random)
    if size == MEDIUM or random.random() < (0.5 if size == SMALL else 0.05):
        return _placed(index, size, words, stated, random)
    place = _middle(size)
    return _Arrangement(
        sprites=(Sprite(index=index, size=size, x=place, y=place),), relation="none", words=words, sizes=(stated,)
    )


def _placed(index: int, size: int, words: str, stated: int | None, random: np.random.Generator) -> _Arrangement:
    """One object in a stated place of the three by three."""
    column, row = (int(n) for n in random.integers(3, size=2))
    state_row = column == 1 or bool(random.random() < 0.6)
    state_column = column != 1 or row == 1
    x, y = _cell(column, size), _cell(row, size)
    if (column, row) in _CORNERS and state_row:
        name = _CORNERS[column, row]
        where = f"in the {name}" + (" corner" if random.random() < 0.5 else "")
    elif state_column and not (column == 1 and row != 1):
        where = str(random.choice(_COLUMN_WORDS[column]))
        state_row = row == 1 and column == 1
    else:
        where = str(random.choice(_ROW_WORDS[row]))
        state_column, state_row = False, True
    return _Arrangement(
        sprites=(Sprite(index=index, size=size, x=x, y=y),),
        relation="none",
        words=f"{words} {where}",
        column=column if state_column else None,
        row=row if state_row else None,
        sizes=(stated,),
    )


def _cell(third: int, size: int) -> int:
    """A position in the first, middle or last third."""
    return (0, _middle(size), SIDE - size)[third]


def _middle(size: int) -> int:
    """Where something of this extent begins to be centred."""
    return (SIDE - size) // 32 * 16


def _two(random: np.random.Generator) -> _Arrangement:
    first, second = (int(n) for n in random.choice(len(object_names()), size=2, replace=False))
    sizes = ((MEDIUM, MEDIUM), (LARGE, SMALL), (SMALL, LARGE), (MEDIUM, SMALL), (SMALL, MEDIUM), (SMALL, SMALL))
    size_a, size_b = sizes[random.choice(len(sizes), p=(0.48, 0.15, 0.15, 0.05, 0.05, 0.12))]
    differ = size_a != size_b
    a, stated_a = _sized(first, size_a, differ or size_a == SMALL, random)
    b, stated_b = _sized(second, size_b, differ or size_b == SMALL, random)
    beside = random.random() < 0.7
    place = _beside if beside else _stacked
    sprites = place(first, size_a, second, size_b)
    words = str(random.choice(_BESIDE_WORDS if beside else _STACKED_WORDS)).format(a=a, b=b)
    return _Arrangement(
        sprites=sprites, relation="left of" if beside else "above", words=words, sizes=(stated_a, stated_b)
    )


_BESIDE_WORDS = (
    "{a} to the left of {b}",
    "{a} to the left of {b}",
    "{b} to the right of {a}",
    "{b} to the right of {a}",
    "{a} on the left and {b} on the right",
    "{b} on the right and {a} on the left",
    "{a} and {b}",
    "{a} and {b}",
    "{a} next to {b}",
    "{a} beside {b}",
    "{a} with {b}",
)
_STACKED_WORDS = (
    "{a} above {b}",
    "{a} above {b}",
    "{a} over {b}",
    "{b} below {a}",
    "{b} under {a}",
    "{a} on top of {b}",
)


def _span(size_a: int, size_b: int) -> tuple[int, int]:
    """Where two objects begin along the axis that separates them: as much room between them as around them, on the
    grid."""
    free = (SIDE - size_a - size_b) // 16
    outer = free // 4
    return 16 * outer, SIDE - 16 * outer - size_b


def _beside(first: int, size_a: int, second: int, size_b: int) -> tuple[Sprite, ...]:
    """Two objects on one ground."""
    x_a, x_b = _span(size_a, size_b)
    foot = _middle(max(size_a, size_b)) + max(size_a, size_b)
    return (
        Sprite(index=first, size=size_a, x=x_a, y=foot - size_a),
        Sprite(index=second, size=size_b, x=x_b, y=foot - size_b),
    )


def _stacked(first: int, size_a: int, second: int, size_b: int) -> tuple[Sprite, ...]:
    """Two objects on one vertical."""
    y_a, y_b = _span(size_a, size_b)
    return (
        Sprite(index=first, size=size_a, x=_middle(size_a), y=y_a),
        Sprite(index=second, size=size_b, x=_middle(size_b), y=y_b),
    )


def _row_of(indices: tuple[int, ...], words: str, size: int) -> _Arrangement:
    """Objects of one size in a row across the middle."""
    count = len(indices)
    free = (SIDE - size * count) // 16
    outer = free // (2 * count)
    gap = (free - 2 * outer) // (count - 1)
    places = (16 * outer + n * (size + 16 * gap) for n in range(count))
    sprites = tuple(Sprite(index=i, size=size, x=x, y=_middle(size)) for i, x in zip(indices, places, strict=True))
    return _Arrangement(sprites=sprites, relation="left of", words=words, sizes=(None,) * count)


def _three(random: np.random.Generator) -> _Arrangement:
    indices = tuple(int(n) for n in random.choice(len(object_names()), size=3, replace=False))
    a, b, c = (with_article(noun_of(i, random)) for i in indices)
    form = random.choice(
        (
            "{a}, {b} and {c}",
            "{a}, {b} and {c}",
            "{a}, {b}, {c}",
            "{a}, {b} and {c} in a row",
            "from left to right {a}, {b} and {c}",
        )
    )
    return _row_of(indices, str(form).format(a=a, b=b, c=c), SMALL)


def _several(count: int, size: int, word: str, random: np.random.Generator) -> _Arrangement:
    index = int(random.integers(len(object_names())))
    plural = object_names()[index].plural
    sized = f"{random.choice(_SIZE_WORDS[SMALL])} {plural}" if size == SMALL and count == 2 else plural
    return _row_of((index,) * count, f"{word} {sized}", size)


def _two_of(random: np.random.Generator) -> _Arrangement:
    return _several(2, int(random.choice((MEDIUM, SMALL), p=(0.7, 0.3))), "two", random)


def _three_of(random: np.random.Generator) -> _Arrangement:
    return _several(3, SMALL, "three", random)


_ARRANGE = {"one": _one, "two": _two, "row": _three, "two of": _two_of, "three of": _three_of}
