"""Other texts than the prompt, for a model's second and third text encoder, and for what to stay away from.

Legend: P prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

OTHERS = ("prompt_2", "prompt_3")
OTHER_NEGATIVES = ("negative_prompt_2", "negative_prompt_3")
Text = str | Sequence[str] | None
"""One for all prompts, one for each, or none given."""


@dataclass(frozen=True, kw_only=True)
class OtherTexts:
    """What a model's second and third text encoder read, one text for each of P prompts; a model with fewer encoders
    leaves them."""

    second: tuple[str, ...]
    third: tuple[str, ...]

    @classmethod
    def of(cls, first: tuple[str, ...], second: Text, third: Text) -> "OtherTexts":
        """Those that are given, else what the first encoder reads."""
        return cls(second=per_prompt(second, first), third=per_prompt(third, first))

    @property
    def are_empty(self) -> bool:
        """Whether nothing is said."""
        return not any((*self.second, *self.third))


def per_prompt(given: Text, default: tuple[str, ...]) -> tuple[str, ...]:
    """One text for each prompt, `default` where none is given."""
    if given is None:
        return default
    return (given,) * len(default) if isinstance(given, str) else tuple(given)
