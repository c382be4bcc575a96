"""The 120 things the bundled model can draw, and the words for them.

`objects.json` gives, per object, its emoji and its synonyms; plurals follow English spelling except where the file says
otherwise.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ATLAS_COLUMNS = 12


@dataclass(frozen=True, kw_only=True)
class ObjectName:
    """One drawable object: `name` is canonical, `synonyms` are other words for it, `plural` is the word after "two"."""

    name: str
    plural: str
    emoji: str
    synonyms: tuple[str, ...]


@cache
def object_names() -> tuple[ObjectName, ...]:
    """All objects, in the order of their class indices."""
    entries = json.loads((Path(__file__).parent / "objects.json").read_text(encoding="utf-8"))
    return tuple(
        ObjectName(
            name=name,
            plural=entry.get("plural") or plural_of(name),
            emoji=entry["emoji"],
            synonyms=tuple(entry["synonyms"]),
        )
        for name, entry in entries.items()
    )


def plural_of(noun: str) -> str:
    """The regular English plural of a noun."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def with_article(noun: str) -> str:
    """`noun` behind "a" or "an" (nouns that are plural already stand alone)."""
    if noun in {"grapes", "cherries", "fries", "french fries"}:
        return noun
    return ("an " if noun[0] in "aeiou" and not noun.startswith("uni") else "a ") + noun
