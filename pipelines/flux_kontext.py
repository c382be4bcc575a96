"""FLUX.1 Kontext, which changes the picture that it looks at: its tokens go after those of the picture that is made.

What is made is as large as asked for, or the model's own size, whatever the picture's; the picture is read at one of
the sizes that the model learnt.

Source: diffusers' FluxKontextPipeline and FluxKontextInpaintPipeline.

Legend: H W pixels.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..denoisers.base import Conditioning
from ..encoders.base import TextEncoder
from .edit import Pictures, check_count
from .flux import LAYOUT as FLUX_LAYOUT
from .flux import FluxFamily, pipeline_of, read_texts
from .image import ImagePipeline
from .parts import Layout, Parts
from .pictures import resized
from .request import Request
from .texts import OtherTexts

FAMILY = "flux-kontext"
LAYOUT: Layout = dataclasses.replace(FLUX_LAYOUT, classes=("FluxKontextPipeline", "FluxKontextInpaintPipeline"))
"""Its files cannot be told from those of FLUX.1 dev."""
_TALL = (
    *((672, 1568), (688, 1504), (720, 1456), (752, 1392)),
    *((800, 1328), (832, 1248), (880, 1184), (944, 1104)),
)
SIZES = (*_TALL, (1024, 1024), *((height, width) for width, height in reversed(_TALL)))
"""Widths and heights that the model learnt."""


class KontextFamily(FluxFamily):
    """FLUX.1's choices."""

    @property
    def draws_posterior(self) -> bool:
        """Pictures become the posterior's mean."""
        return False


@dataclass(frozen=True, kw_only=True)
class KontextEditing:
    """One picture for a prompt is read at that of `sizes` whose ratio is nearest to its own, cut to multiples of
    `multiple`. What is made has `made`, a width and a height."""

    multiple: int
    made: tuple[int, int]
    sizes: Sequence[tuple[int, int]] = SIZES

    def size(self, pictures: Pictures) -> tuple[int, int]:
        """The model's own. ValueError for more pictures than one."""
        check_count(pictures, 1)
        return self.made

    def fitted(self, picture: Tensor) -> Tensor:
        """The picture [3, H, W] at one of the sizes."""
        ratio = picture.shape[-1] / picture.shape[-2]
        _, width, height = min((abs(ratio - width / height), width, height) for width, height in self.sizes)
        return resized(picture, width - width % self.multiple, height - height % self.multiple)

    def condition(
        self,
        encoders: Mapping[str, TextEncoder],
        prompts: Sequence[str],
        others: OtherTexts,
        pictures: Sequence[Pictures],
        request: Request,
    ) -> Conditioning:
        """The text encoders do not see the pictures."""
        return read_texts(encoders, prompts, others, request)


def load_flux_kontext(parts: Parts) -> ImagePipeline:
    """The pipeline of FLUX.1 Kontext's parts. Errors as for `load_flux`."""
    pipe = pipeline_of(parts, LAYOUT, FAMILY, KontextFamily)
    recipe = dataclasses.replace(pipe.recipe, inpaint_strength=1.0)
    editing = KontextEditing(multiple=recipe.size_multiple, made=(recipe.width, recipe.height))
    return dataclasses.replace(pipe, recipe=recipe, editing=editing)
