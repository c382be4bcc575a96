"""How prompts are written for decoder language models, as the models that read their states were trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..language.chat import Message, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Template(Protocol):
    """From a prompt to the text that is read, with the special tokens written out."""

    def __call__(self, prompt: str, tokenizer: "PreTrainedTokenizerBase") -> str:
        """The text.

        Raises:
            ValueError: the tokenizer has no chat template, or it refuses the prompt.
        """
        ...


@dataclass(frozen=True)
class FormatTemplate:
    """A fixed text with one `{}`, where the prompt goes."""

    text: str

    def __post_init__(self) -> None:
        if self.text.count("{}") != 1:
            raise ValueError(f"the template is {self.text!r}; it must have one {{}}, for the prompt")

    def __call__(self, prompt: str, tokenizer: "PreTrainedTokenizerBase") -> str:
        """The text around the prompt."""
        return self.text.replace("{}", prompt)


def user_message(prompt: str) -> list[Message]:
    """The prompt as all that a user says."""
    return [{"role": "user", "content": prompt}]


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The tokenizer's own chat template, of the `messages` that a prompt becomes. `enable_thinking` is told to the
    template unless None.
    """

    messages: Callable[[str], Sequence[Message]] = user_message
    add_generation_prompt: bool = True
    enable_thinking: bool | None = None

    def __call__(self, prompt: str, tokenizer: "PreTrainedTokenizerBase") -> str:
        """The chat as a text."""
        return render_chat(
            cast(Any, tokenizer).get_chat_template(),
            self.messages(prompt),
            add_generation_prompt=self.add_generation_prompt,
            enable_thinking=self.enable_thinking,
            special_tokens=cast(Any, tokenizer).special_tokens_map,
        )


def flux2_messages(prompt: str) -> list[Message]:
    """What FLUX.2 dev tells Mistral; marks of pictures are left out of the prompt."""
    said = {"system": _FLUX2_SYSTEM, "user": prompt.replace("[IMG]", "")}
    return [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said.items()]


_FLUX2_SYSTEM = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)
FLUX2 = ChatTemplate(messages=flux2_messages, add_generation_prompt=False)
FLUX2_KLEIN = ChatTemplate(enable_thinking=False)
Z_IMAGE = ChatTemplate(enable_thinking=True)
QWEN_IMAGE = FormatTemplate(
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and "
    "background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
QWEN_IMAGE_DROP = 34  # tokens before the prompt
QWEN_IMAGE_EDIT = FormatTemplate(
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a "
    "new image that meets the user's requirements while maintaining consistency with the original input where "
    "appropriate.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
QWEN_IMAGE_EDIT_DROP = 64
