"""Errors that say what they are about."""

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def naming(what: object) -> Generator[None, None, None]:
    """A ValueError inside begins with `what`: the file, or the argument, that it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
