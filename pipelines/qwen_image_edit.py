"""Qwen-Image-Edit, which changes a picture, and Qwen-Image-Edit-Plus (2509, 2511), which looks at one or more.

The denoiser reads the latents of a large copy of each picture; the language model sees the same copy, or in Plus a
small one.

Source: diffusers' QwenImageEditPipeline, QwenImageEditInpaintPipeline and QwenImageEditPlusPipeline.

Legend: H W pixels.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ..denoisers.base import Conditioning
from ..denoisers.qwen_image import EDIT_MARKS, MARKS, PATCH
from ..encoders.base import TextEncoder
from ..encoders.in_files import QWEN2_5_VL
from ..encoders.vision_language import Positions, VisionLanguageEncoder, load_vision_language_encoder
from .edit import Pictures, check_count
from .family import COMMON
from .image import ImagePipeline
from .parts import Layout, Parts
from .pictures import resized, size_text
from .qwen_image import QwenImageFamily, pipeline_of
from .request import Request
from .text_options import conditioning_given, conditioning_of
from .texts import OtherTexts

FAMILY = "qwen-image-edit"
LAYOUT = Layout(
    classes=("QwenImageEditPlusPipeline",),
    encoders={"llm": "text_encoder"},
    tokenizers={"llm": "processor"},
    processors={"llm": "Qwen2VLProcessor"},
    marks=EDIT_MARKS,
    inside={"llm": (QWEN2_5_VL,)},
)
FIRST_LAYOUT = dataclasses.replace(
    LAYOUT, classes=("QwenImageEditPipeline", "QwenImageEditInpaintPipeline"), marks=MARKS
)
"""Its files cannot be told from Qwen-Image's."""
MULTIPLE = 32  # of the sides of what is read
LARGEST_RATIO = 100


class QwenImageEditFamily(QwenImageFamily):
    """Qwen-Image's choices; prompts are read whole."""

    @property
    def arguments(self) -> frozenset[str]:
        """All common ones, and the scale's other name."""
        return COMMON | {"true_cfg_scale"}

    def warnings(self, request: Request) -> tuple[str, ...]:
        """Also that there is no picture."""
        told = () if _has_picture(request) else ("image: this model changes pictures, and there is none",)
        return (*super().warnings(request), *told)


class QwenImageFirstEditFamily(QwenImageEditFamily):
    """The same, of a picture that must be given."""

    def check(self, request: Request) -> None:
        """Also that there is a picture."""
        super().check(request)
        if not _has_picture(request):
            raise ValueError("image: this model changes a picture, and there is none; give one")


@dataclass(frozen=True, kw_only=True)
class QwenImageEditing:
    """Pictures are read at areas of about `seen` pixels by the language model and `read` by the autoencoder, in their
    own ratio; at most `most` for a prompt. What is made has about `made` pixels, the last picture's ratio, and sides of
    multiples of `multiple`."""

    multiple: int
    seen: int = 384**2
    read: int = 1024**2
    made: int = 1024**2
    most: int | None = None

    def size(self, pictures: Pictures) -> tuple[int, int]:
        """In the last picture's ratio. ValueError for more pictures than the model looks at."""
        if self.most is not None:
            check_count(pictures, self.most)
        width, height = _sides(self.made, pictures[-1])
        return width - width % self.multiple, height - height % self.multiple

    def fitted(self, picture: Tensor) -> Tensor:
        """The large copy, for the autoencoder.

        Raises:
            ValueError: it is too narrow.
        """
        if max(picture.shape[-2:]) > LARGEST_RATIO * min(picture.shape[-2:]):
            raise ValueError(f"is {size_text(picture)}; one side may be {LARGEST_RATIO} times the other at most")
        return resized(picture, *_sides(self.read, picture))

    def small(self, picture: Tensor) -> Tensor:
        """The copy that the language model sees."""
        return resized(picture, *_sides(self.seen, picture))

    def condition(
        self,
        encoders: Mapping[str, TextEncoder],
        prompts: Sequence[str],
        others: OtherTexts,
        pictures: Sequence[Pictures],
        request: Request,
    ) -> Conditioning:
        """The language model's last states of the small copies and the prompts."""
        encoder = encoders["llm"]
        if not isinstance(encoder, VisionLanguageEncoder):
            raise ValueError(f"image: the encoder {type(encoder).__name__} reads text alone")
        distinct = {id(picture): picture for row in pictures for picture in row}
        seen = {key: self.small(picture) for key, picture in distinct.items()}
        text = encoder(prompts, [[seen[id(picture)] for picture in row] for row in pictures])
        return conditioning_of(text)


def load_qwen_image_edit(parts: Parts) -> ImagePipeline:
    """The pipeline of Qwen-Image-Edit-Plus' parts.

    Raises:
        FileNotFoundError: a component or a file is missing. ValueError: a file is damaged, or they do not fit together.
    """
    read = partial(load_vision_language_encoder, attention=parts.attention)
    pipe = pipeline_of(parts, LAYOUT, FAMILY, QwenImageEditFamily, read)
    return dataclasses.replace(pipe, editing=QwenImageEditing(multiple=PATCH * pipe.vae.downsampling))


def load_first_qwen_image_edit(parts: Parts) -> ImagePipeline:
    """The pipeline of Qwen-Image-Edit's parts. Errors as for `load_qwen_image_edit`."""
    read = partial(load_vision_language_encoder, heading="", attention=parts.attention)
    pipe = pipeline_of(parts, FIRST_LAYOUT, FAMILY, QwenImageFirstEditFamily, read)
    editing = QwenImageEditing(multiple=PATCH * pipe.vae.downsampling, seen=1024**2, most=1)
    return dataclasses.replace(pipe, editing=editing)


def with_positions(pipe: ImagePipeline, positions: Positions) -> ImagePipeline:
    """The pipeline with other positions for what the language model sees: "axes", as it was trained, or "diffusers", to
    compare with what diffusers 0.42 makes of transformers 5.

    Raises:
        ValueError: its language model sees nothing, or there are no such positions.
    """
    encoder = pipe.encoders["llm"]
    if not isinstance(encoder, VisionLanguageEncoder):
        raise ValueError(f"positions: the encoder {type(encoder).__name__} reads text alone")
    return dataclasses.replace(
        pipe, encoders={**pipe.encoders, "llm": dataclasses.replace(encoder, positions=positions)}
    )


def _has_picture(request: Request) -> bool:
    """Whether it looks at a picture, or holds what was seen of one."""
    return request.image is not None or any(part.references for part in conditioning_given(request))


def _sides(area: int, picture: Tensor) -> tuple[int, int]:
    """Width and height of about this area in the picture's ratio, as the reference rounds them."""
    ratio = picture.shape[-1] / picture.shape[-2]
    width = math.sqrt(area * ratio)
    return round(width / MULTIPLE) * MULTIPLE, round(width / ratio / MULTIPLE) * MULTIPLE
