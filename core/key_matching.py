"""Tries one layout on a checkpoint, and says in a line why none fits."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from .key_rules import Fill, Layout, PlacedPart, Rule
from .row_operations import Shape, apply_shape

_Groups: TypeAlias = dict[str, list[tuple[Rule, dict[int, str]]]]
_EXAMPLES = 3
_FOREIGN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("a bitsandbytes-quantised model, which cannot be read", (".absmax", ".quant_map", ".quant_state")),
    ("a Nunchaku (SVDQuant) model, which cannot be read", (".wscales", ".smooth_factor", ".proj_down")),
    ("a GPTQ- or AWQ-quantised model, which cannot be read", (".qzeros", ".g_idx")),
    ("a LoRA, not a model", (".lora_A", ".lora_B", ".lora_down", ".lora_up")),
    ("a model that quanto quantised, which cannot be read", (".weight._data", ".weight._scale")),
    ("a model with float8 weights scaled block by block, which cannot be read", (".weight_scale_inv",)),
    ("a model with scaled float8 weights, without the weights", (".scale_weight", ".weight_scale")),
)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What came of reading a checkpoint as one layout behind one prefix."""

    layout: Layout
    prefix: str
    fills: dict[str, Fill]
    unmatched: tuple[str, ...]  # checkpoint keys that nothing uses
    missing: tuple[str, ...]  # parameters without a value
    problems: tuple[str, ...]  # shapes that differ, parameters with two values, rows left over

    @property
    def fits(self) -> bool:
        """Whether every key is used, and every parameter filled once with its shape."""
        return not (self.unmatched or self.missing or self.problems)


def attempt(layout: Layout, prefix: str, sources: Mapping[str, Shape], targets: Mapping[str, Shape]) -> Attempt:
    """Reads a checkpoint with tensors `sources` as `layout`, for a model with parameters `targets`."""
    groups = _group(layout, prefix, sources, targets)
    complete: _Groups = {
        target: whole
        for target, group in groups.items()
        if (whole := [(rule, found) for rule, found in group if len(found) == len(rule.parts)])
    }
    missing = tuple(target for target in targets if target not in complete)
    counted = (*complete.values(), *(groups[target] for target in missing if target in groups))
    used = {key for group in counted for _, found in group for key in found.values()}
    dropped = {key for key in sources if layout.drops_key(key, prefix)}
    fills, problems = _fill(complete, sources, targets)
    return Attempt(
        layout=layout,
        prefix=prefix,
        fills=fills,
        unmatched=tuple(key for key in sources if key not in used and key not in dropped),
        missing=missing,
        problems=tuple(problems or _left_over(fills, sources, dropped)),
    )


def foreign_format(keys: Iterable[str]) -> str | None:
    """What a checkpoint is, in words, if its keys show a format that no model here comes in."""
    known = tuple(keys)
    return next((what for what, marks in _FOREIGN if any(_marked(key, marks) for key in known)), None)


def report(attempts: Sequence[Attempt], sources: Mapping[str, Shape], targets: Mapping[str, Shape]) -> str:
    """Why the nearest of some failed attempts does not fit: counts, examples, what was expected."""
    foreign = foreign_format(sources)
    nearest = max(attempts, key=lambda tried: (-len(tried.unmatched) - len(tried.missing), -len(tried.problems)))
    lines: list[str] = [f"the keys are those of {foreign}"] if foreign else []
    if nearest.unmatched:
        lines.append(f"{len(nearest.unmatched)} of {len(sources)} keys match nothing ({_some(nearest.unmatched)})")
    if nearest.missing:
        needs = [_needs(nearest, target, sources) for target in nearest.missing]
        lines.append(f"{len(needs)} of {len(targets)} parameters have no value ({_some(needs)})")
    if nearest.problems:
        lines.append(f"{len(nearest.problems)} misfits ({_some(nearest.problems, '; ')})")
    lines.append(_expectation(nearest, attempts, len(sources)))
    return "; ".join(lines)


def _group(layout: Layout, prefix: str, sources: Mapping[str, Shape], targets: Mapping[str, Shape]) -> _Groups:
    """For each parameter, the rules of which at least one source is there, and the sources found by their place."""
    groups: _Groups = {}
    by_rule: dict[tuple[int, str], dict[int, str]] = {}
    for key in sources:
        if not key.startswith(prefix):
            continue
        for rule, place, values in layout.uses(key.removeprefix(prefix)):
            target = rule.target_name(values)
            if target not in targets:
                continue
            identity = (id(rule), target)
            if identity not in by_rule:
                by_rule[identity] = {}
                groups.setdefault(target, []).append((rule, by_rule[identity]))
            by_rule[identity][place] = key
    return groups


def _fill(
    complete: _Groups, sources: Mapping[str, Shape], targets: Mapping[str, Shape]
) -> tuple[dict[str, Fill], list[str]]:
    """The parameters that can be filled, and why others cannot."""
    fills: dict[str, Fill] = {}
    problems: list[str] = []
    for target, group in complete.items():
        if len(group) > 1:
            problems.append(f"{target} has {len(group)} values: {', '.join(found[0] for _, found in group)}")
            continue
        fill = _place(target, *group[0], sources, targets[target])
        if isinstance(fill, Fill):
            fills[target] = fill
        else:
            problems.append(fill)
    return fills, problems


def _place(
    target: str, rule: Rule, found: Mapping[int, str], sources: Mapping[str, Shape], wanted: Shape
) -> Fill | str:
    """The parts of one parameter in their rows, or why they do not make it up."""
    parts: list[PlacedPart] = []
    shapes: list[Shape] = []
    row = 0
    for place, part in enumerate(rule.parts):
        source = found[place]
        try:
            shape = apply_shape(part.operations, sources[source])
        except ValueError as error:
            return f"{target}: {source}: {error}"
        height = shape[0] if shape else 1
        parts.append(PlacedPart(source=source, operations=part.operations, start=row, stop=row + height))
        shapes.append(shape)
        row += height
    joined = shapes[0] if len(shapes) == 1 else (row, *shapes[0][1:])
    if joined != wanted or any(shape[1:] != wanted[1:] for shape in shapes):
        given = " + ".join(f"{part.source} {list(sources[part.source])}" for part in parts)
        return f"{target}: the model has the shape {list(wanted)}, the checkpoint gives {given}"
    return Fill(target=target, shape=wanted, parts=tuple(parts))


def _left_over(fills: Mapping[str, Fill], sources: Mapping[str, Shape], dropped: set[str]) -> list[str]:
    """Tensors of which the rules take some rows but not all."""
    taken: dict[str, dict[object, int]] = {}
    for fill in fills.values():
        for part in fill.parts:
            size = prod(apply_shape(part.operations, sources[part.source]))
            taken.setdefault(part.source, {})[part.operations] = size
    return [
        f"only {sum(sizes.values())} of the {prod(sources[key])} elements of {key} are used"
        for key, sizes in taken.items()
        if sum(sizes.values()) < prod(sources[key]) and key not in dropped
    ]


def _needs(nearest: Attempt, target: str, sources: Mapping[str, Shape]) -> str:
    ways = [
        [name for key in keys if (name := nearest.prefix + key) not in sources]
        for keys in nearest.layout.expected(target)
    ]
    absent = min(ways, key=len, default=[])
    return target if absent in ([], [target]) else f"{target} from {' + '.join(absent[:_EXAMPLES])}"


def _expectation(nearest: Attempt, attempts: Sequence[Attempt], num_keys: int) -> str:
    names = list(dict.fromkeys(tried.layout.name for tried in attempts))
    examples = [nearest.prefix + rule.parts[0].pattern for rule in nearest.layout.rules[:_EXAMPLES]]
    if len(nearest.unmatched) < num_keys:
        prefix = f" with keys that begin with {nearest.prefix!r}" if nearest.prefix else ""
        text = f"the nearest known layout is {nearest.layout.name!r}{prefix}"
        return text if len(names) == 1 else f"{text} (known: {', '.join(names)})"
    return f"known layouts: {', '.join(names)}; {nearest.layout.name!r} has keys such as {', '.join(examples)}"


def _marked(key: str, marks: tuple[str, ...]) -> bool:
    return any(key.endswith(mark) or f"{mark}." in key for mark in marks)


def _some(examples: Sequence[str], separator: str = ", ") -> str:
    shown = separator.join(examples[:_EXAMPLES])
    return shown if len(examples) <= _EXAMPLES else f"{shown}{separator}..."
