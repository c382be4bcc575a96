"""How HunyuanVideo 1.5 reads prompts: Qwen2.5-VL, asked to describe a video, and ByT5 for what is to be read in it.

Source: diffusers' HunyuanVideo15Pipeline.

Legend: B rows, L tokens, D width.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..language.chat import Message
from ..language.checkpoints import ModelSource
from .base import EncodedText
from .origin import TextComponent, TextOrigin
from .prompts import checked_prompts
from .t5 import BYTES, T5Encoder, load_t5
from .templates import ChatTemplate

GLYPH_TOKENS = 256
_ASPECTS = (
    "You are a helpful assistant. Describe the video by detailing the following aspects:",
    "1. The main content and theme of the video.",
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects.",
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects.",
    "4. background environment, light, style and atmosphere.",
    "5. camera angles, movements, and transitions used in the video.",
)
SYSTEM = f"{' ' * 9}".join(_ASPECTS)
"""With the spaces that the model was trained with."""
_QUOTED = re.compile(r'"(.*?)"|“(.*?)”')


def hunyuan_video_messages(prompt: str) -> list[Message]:
    """What Qwen2.5-VL is told; an empty prompt is a space."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt or " "}]


HUNYUAN_VIDEO = ChatTemplate(messages=hunyuan_video_messages)
HUNYUAN_VIDEO_DROP = 108  # tokens before the prompt


def glyph_text(prompt: str) -> str | None:
    """What ByT5 reads of a prompt: its parts in straight or curly double quotes, each once; None where there are
    none."""
    found = [straight or curly for straight, curly in _QUOTED.findall(prompt)]
    return "".join(f'Text "{text}". ' for text in dict.fromkeys(found)) if found else None


@dataclass(frozen=True, kw_only=True)
class GlyphEncoder:
    """States of what is in quotes in each prompt, read by `t5`; rows of prompts without quotes have none."""

    t5: T5Encoder

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str]) -> EncodedText:
        """States [B, L, D] of the prompts.

        Raises:
            ValueError: no prompts, or one that is not a string of whole characters.
        """
        texts = [glyph_text(prompt) for prompt in checked_prompts(prompts)]
        read = [text for text in texts if text is not None]
        if not read:
            nothing = torch.zeros(len(texts), 0, self.t5.model.config.d_model)
            return EncodedText(states=nothing, lengths=torch.zeros(len(texts), dtype=torch.int64))
        found = self.t5(read)
        rows = [place for place, text in enumerate(texts) if text is not None]
        states = found.states.new_zeros(len(texts), *found.states.shape[1:])
        states[rows] = found.states
        lengths = found.lengths.new_zeros(len(texts))
        lengths[rows] = found.lengths
        return EncodedText(states=states, lengths=lengths, warnings=found.warnings)

    @property
    def origin(self) -> TextOrigin | None:
        """What it was loaded from."""
        return self.t5.origin

    def resident(self) -> "GlyphEncoder":
        """The same encoder with its weights in memory."""
        return dataclasses.replace(self, t5=self.t5.resident())

    def component(self) -> TextComponent:
        """See `SaveableEncoder`."""
        return self.t5.component()


def load_glyph_encoder(
    model: str | ModelSource,
    tokenizer_folder: str | Path,
    *,
    variant: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> GlyphEncoder:
    """The encoder of a folder with a T5 encoder, or of one in a file, and of a folder with a tokenizer of bytes.
    Errors as for `load_t5`."""
    t5 = load_t5(
        model,
        tokenizer_folder,
        max_tokens=GLYPH_TOKENS,
        pad_to_max=False,
        masked=True,
        tokenizer_class=BYTES,
        variant=variant,
        device=device,
        dtype=dtype,
    )
    return GlyphEncoder(t5=t5)
