"""Weights that come only in variants, such as "fp16", which are asked for by their names."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from ..core.component_files import is_index, variant_of_weights


def check_variants(place: object, names: Iterable[str], variant: str | None) -> None:
    """Makes sure that which of a component's files are read can be told; `names` are theirs, `place` its own.

    Raises:
        ValueError: there are several, which come only in variants, and `variant` is none of these.
    """
    inside = tuple(names)
    weights = [name for name in inside if name.endswith(".safetensors")]
    indices = [name for name in inside if name.endswith(".safetensors.index.json")]
    is_listed = len(indices) == 1 or any(is_index(name, None) for name in indices)
    found = only_variants(weights)
    if len(weights) > 1 and found and variant not in found and not is_listed:
        raise ValueError(_told(place, found))


@contextmanager
def naming_variants(folders: Iterable[Path], variant: str | None) -> Generator[None, None, None]:
    """Says what to ask for where a file is not found in one of these folders, whose weights come only in variants.

    Raises:
        ValueError: they do, and `variant` is none of these.
    """
    try:
        yield
    except FileNotFoundError as error:
        for folder in (each for each in folders if str(each) in str(error)):
            found = only_variants(file.name for file in folder.glob("*.safetensors"))
            if found and variant not in found:
                raise ValueError(_told(folder, found)) from None
        raise


def only_variants(weights: Iterable[str]) -> tuple[str, ...]:
    """The variants that files of weights are of; none where one of them is of no variant."""
    found = {variant_of_weights(name) for name in weights}
    return tuple(sorted(name for name in found if name is not None)) if None not in found else ()


def _told(place: object, variants: tuple[str, ...]) -> str:
    ways = " or ".join(f"variant={name!r}" for name in variants)
    return f"{place} has its weights only in variants: pass {ways}"
