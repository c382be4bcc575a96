"""What rewrites a short prompt into a fuller one."""

from typing import Protocol, runtime_checkable


class Text(Protocol):
    """Something with a text, such as a `Completion`."""

    @property
    def text(self) -> str:
        """The text."""
        ...


@runtime_checkable
class PromptExpander(Protocol):
    """A language model, or anything else that rewrites prompts."""

    def expand(self, prompt: str) -> Text:
        """A fuller description of what `prompt` names; the same for the same prompt."""
        ...
