"""The parts of a key map: patterns of names, rules, layouts, and the placed tensors that come out.

Several sources of a rule are joined on dim 0 in the order written. Placeholders: `{i}` (one letter) is a number,
`{leaf}` (longer) one word without dots, `{any*}` anything.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from .row_operations import Operation, Shape

_PLACEHOLDER = re.compile(r"\{([a-z_]+)(\*?)\}")


@dataclass(frozen=True)
class Part:
    """One source of a rule: a pattern for checkpoint keys and what is done to the tensor."""

    pattern: str
    operations: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class Rule:
    """Checkpoint keys that match `sources`, put through `operations`, joined on dim 0, are the parameter `target`.

    Every source must use the placeholders of the target, no more and no fewer.
    """

    sources: str | Part | tuple[str | Part, ...]
    target: str
    operations: tuple[Operation, ...] = ()

    def __post_init__(self) -> None:
        wanted = Pattern(self.target).placeholders
        for part in self.parts:
            if Pattern(part.pattern).placeholders != wanted:
                raise ValueError(f"the placeholders of {part.pattern!r} are not those of its target {self.target!r}")
        if not self.parts:
            raise ValueError(f"a rule for {self.target!r} needs a source; use Layout.drops to ignore keys")

    def target_name(self, values: Mapping[str, str]) -> str:
        """The parameter filled, given the placeholders' values."""
        return self._target.format(values)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The sources as parts, the rule's own operations last."""
        sources = self.sources if isinstance(self.sources, tuple) else (self.sources,)
        parts = (Part(source) if isinstance(source, str) else source for source in sources)
        return tuple(Part(part.pattern, part.operations + self.operations) for part in parts)

    @cached_property
    def _target(self) -> "Pattern":
        return Pattern(self.target)


@dataclass(frozen=True)
class Layout:
    """One known way to name the tensors of a model.

    `drops` are patterns of keys to ignore where no rule uses them; `prefixes` are what a file may put before every key.
    """

    name: str
    rules: tuple[Rule, ...]
    drops: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("",)

    def uses(self, key: str) -> Iterator[tuple[Rule, int, dict[str, str]]]:
        """Every rule, with the place of the part and the placeholders' values, that uses a key (without its prefix)."""
        for rule, place in self._exact.get(key, ()):
            yield rule, place, {}
        for pattern, rule, place in self._patterns:
            values = pattern.match(key)
            if values is not None:
                yield rule, place, values

    def drops_key(self, key: str, prefix: str) -> bool:
        """Whether a key is ignored; drops are written with or without the prefix."""
        names = {key, key.removeprefix(prefix)}
        return any(pattern.match(name) is not None for pattern in self._drops for name in names)

    def expected(self, target: str) -> tuple[tuple[str, ...], ...]:
        """The keys from which each rule for a parameter would fill it."""
        matches = ((rule, pattern.match(target)) for pattern, rule in self._targets)
        return tuple(
            tuple(Pattern(part.pattern).format(values) for part in rule.parts)
            for rule, values in matches
            if values is not None
        )

    @cached_property
    def _exact(self) -> dict[str, list[tuple[Rule, int]]]:
        exact: dict[str, list[tuple[Rule, int]]] = {}
        for rule in self.rules:
            for place, part in enumerate(rule.parts):
                if not Pattern(part.pattern).placeholders:
                    exact.setdefault(part.pattern, []).append((rule, place))
        return exact

    @cached_property
    def _patterns(self) -> tuple[tuple["Pattern", Rule, int], ...]:
        parts = ((Pattern(part.pattern), rule, place) for rule in self.rules for place, part in enumerate(rule.parts))
        return tuple(entry for entry in parts if entry[0].placeholders)

    @cached_property
    def _targets(self) -> tuple[tuple["Pattern", Rule], ...]:
        return tuple((Pattern(rule.target), rule) for rule in self.rules)

    @cached_property
    def _drops(self) -> tuple["Pattern", ...]:
        return tuple(Pattern(text) for text in self.drops)


@dataclass(frozen=True, kw_only=True)
class PlacedPart:
    """A checkpoint tensor that, after `operations`, is rows start:stop of a parameter."""

    source: str
    operations: tuple[Operation, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Fill:
    """Where one parameter of shape `shape` comes from."""

    target: str
    shape: Shape
    parts: tuple[PlacedPart, ...]


@dataclass(frozen=True)
class Pattern:
    """A name with placeholders."""

    text: str

    @cached_property
    def placeholders(self) -> frozenset[str]:
        """Their names."""
        return frozenset(match[1] for match in _PLACEHOLDER.finditer(self.text))

    def match(self, name: str) -> dict[str, str] | None:
        """The placeholders' values if the whole name matches."""
        if not name.startswith(self._start):
            return None
        match = self._regex.fullmatch(name)
        return None if match is None else match.groupdict()

    def format(self, values: Mapping[str, str]) -> str:
        """The name with values put in."""
        return _PLACEHOLDER.sub(lambda match: values[match[1]], self.text)

    @cached_property
    def _start(self) -> str:
        return self.text.split("{", 1)[0]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        text, position, seen = "", 0, set[str]()
        for match in _PLACEHOLDER.finditer(self.text):
            name, star = match[1], match[2]
            kind = ".+" if star else r"\d+" if len(name) == 1 else r"[^.]+"
            text += re.escape(self.text[position : match.start()])
            text += f"(?P={name})" if name in seen else f"(?P<{name}>{kind})"
            seen.add(name)
            position = match.end()
        return re.compile(text + re.escape(self.text[position:]))
