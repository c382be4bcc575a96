"""What Wan's families make of prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..denoisers.base import Conditioning
from ..encoders.base import TextEncoder
from ..encoders.cleaning import cleaned
from ..schedulers import Schedule
from .request import Request
from .text_options import conditioning_of, limited, options_given
from .texts import OtherTexts


class WanTexts:
    """What they have in common, as `Family` has it."""

    @property
    def draws_posterior(self) -> bool:
        """The reference takes the mean."""
        return False

    def late(self, schedule: Schedule, strength: float) -> Schedule:
        """The last `int(n strength)` steps."""
        return schedule.starting_at(strength)

    def condition(
        self, encoders: Mapping[str, TextEncoder], prompts: Sequence[str], others: OtherTexts, request: Request
    ) -> Conditioning:
        """The states of the prompts, cleaned."""
        return conditioning_of(limited(encoders["t5"], request)([cleaned(prompt) for prompt in prompts]))

    def described(self, request: Request) -> Mapping[str, Any]:
        """The length, where it is given."""
        return options_given(request, "max_sequence_length")
