"""FLUX.2 (dev, klein, klein KV): making pictures, and editing with one or more pictures to look at.

Source: diffusers' Flux2Pipeline, Flux2KleinPipeline, Flux2KleinInpaintPipeline and Flux2KleinKVPipeline.

Legend: H W pixels.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from ..core.loading import build_on_meta
from ..core.weight_source import WeightSource
from ..denoisers.base import Conditioning
from ..denoisers.flux2 import MARKS, Flux2Config, Flux2Denoiser, flux2_key_map
from ..denoisers.flux2_kv import Flux2KVDenoiser
from ..denoisers.guidance import ClassifierFree, Distilled, Guidance, Unguided
from ..encoders.base import TextEncoder
from ..encoders.decoder import Layer, load_decoder_encoder
from ..encoders.in_files import MISTRAL, QWEN3
from ..encoders.templates import FLUX2, FLUX2_KLEIN
from ..language.checkpoints import ModelSource, model_config
from ..schedulers import Schedule
from ..schedulers.flow_match import FlowMatchConfig, flux2_mu
from ..vae.flux2 import PATCH, load_flux2_kl, load_flux2_kl_file
from .base import Source
from .distilled import check_told, with_told
from .edit import Pictures
from .family import COMMON, guidance_scale
from .few_steps import many_steps
from .flow import FlowFamily, size_shifted_schedule
from .folders import check_entries
from .image import ImagePipeline
from .parts import Layout, Parts
from .pictures import centre_crop, resized, size_text
from .recipe import Recipe
from .request import Request
from .text_options import check_text, check_unpadded, conditioning_of, limited
from .texts import OtherTexts
from .true_cfg import begins_above_1

FAMILY = "flux2"
KV_PIPELINE = "Flux2KleinKVPipeline"
LAYOUT = Layout(
    classes=("Flux2Pipeline", "Flux2KleinPipeline", "Flux2KleinInpaintPipeline", KV_PIPELINE),
    encoders={"llm": "text_encoder"},
    tokenizers={"llm": "tokenizer"},
    marks=MARKS,
    inside={"llm": (MISTRAL, *QWEN3)},
)
SCHEDULER = FlowMatchConfig(shift=3.0, use_dynamic_shifting=True)
"""For files that have none."""
Kind = Literal["dev", "klein", "klein base", "klein kv"]
FEW_STEPS = ("klein", "klein kv")
STEPS = 4  # of these
LONGEST = 512  # tokens that are read, prompt and template
DEV_LAYERS, KLEIN_LAYERS = (10, 20, 30), (9, 18, 27)
DEFAULT_CELLS = 64  # latent cells a side of a picture whose size is not given
SMALLEST, LARGEST_AREA, LARGEST_RATIO = 64, 1024**2, 8  # of a picture that is looked at, in pixels


@dataclass(frozen=True, kw_only=True)
class Flux2Family(FlowFamily):
    """FLUX.2's choices.

    `guidance_scale` is the value that dev is told. On klein base it is classifier-free guidance, where it is over 1,
    one pass after the other; klein and klein KV, distilled for few steps, run without.
    """

    kind: Kind

    def index(self) -> Mapping[str, Any]:
        """See `IndexedFamily`."""
        if self.kind == "dev":
            return {"_class_name": "Flux2Pipeline"}
        if self.kind == "klein kv":
            return {"_class_name": KV_PIPELINE}
        return {"_class_name": "Flux2KleinPipeline", "is_distilled": self.kind == "klein"}

    @property
    def arguments(self) -> frozenset[str]:
        """All common ones, and the text's length."""
        return COMMON | {"max_sequence_length"}

    @property
    def draws_posterior(self) -> bool:
        """Pictures become the posterior's mean."""
        return False

    def check(self, request: Request) -> None:
        """The length is within what the model was made for, and given conditioning is whole."""
        check_text(request, longest=LONGEST)
        check_unpadded(request)
        check_told(request, guided=self.kind == "dev")

    def guidance(self, request: Request, recipe: Recipe) -> Guidance:
        """The distilled value, or classifier-free guidance."""
        scale = guidance_scale(request, recipe)
        told = scale if self.kind == "dev" else None
        if request.guidance is not None:
            return with_told(request.guidance, told)
        if self.kind == "klein base":
            return ClassifierFree(scale, batched=False) if scale > 1 else Unguided()
        return Distilled(told)

    def schedule(self, request: Request, recipe: Recipe, num_cells: int) -> Schedule:
        """Equal steps, or the given sigmas, shifted by the size and their number."""
        return size_shifted_schedule(self.scheduler, request, recipe, num_cells, mu=flux2_mu)

    def condition(
        self, encoders: Mapping[str, TextEncoder], prompts: Sequence[str], others: OtherTexts, request: Request
    ) -> Conditioning:
        """The language model's states at three layers."""
        return _condition(encoders, prompts, request)

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What an argument does not do here, or what the model was not made for."""
        scale = request.guidance_scale
        if self.kind == "klein base" and scale is not None and scale < 1:
            return (begins_above_1("guidance_scale", scale),)
        if self.kind not in FEW_STEPS:
            return ()
        has_effect = scale is None or 0 <= scale <= 1
        unused = () if has_effect else (f"guidance_scale {scale} has no effect: this model was made to run without",)
        return (*unused, *many_steps(request, STEPS))


@dataclass(frozen=True, kw_only=True)
class Flux2Editing:
    """Pictures are looked at in their own size, of at most a megapixel, cropped to multiples of `multiple`; the first
    one gives the size of what is made."""

    multiple: int

    def size(self, pictures: Pictures) -> tuple[int, int]:
        """That of the first picture as it is read."""
        height, width = self.fitted(pictures[0]).shape[-2:]
        return width, height

    def fitted(self, picture: Tensor) -> Tensor:
        """The middle of the picture [3, H, W], made smaller first where it is too large.

        Raises:
            ValueError: it is too small, or too narrow.
        """
        height, width = picture.shape[-2:]
        if min(height, width) < SMALLEST:
            raise ValueError(f"is {size_text(picture)}; both sides must be at least {SMALLEST} pixels")
        if max(height, width) > LARGEST_RATIO * min(height, width):
            raise ValueError(f"is {size_text(picture)}; one side may be {LARGEST_RATIO} times the other at most")
        if height * width > LARGEST_AREA:
            scale = math.sqrt(LARGEST_AREA / (height * width))
            width, height = int(width * scale), int(height * scale)
            picture = resized(picture, width, height)
        return centre_crop(picture, width - width % self.multiple, height - height % self.multiple)

    def condition(
        self,
        encoders: Mapping[str, TextEncoder],
        prompts: Sequence[str],
        others: OtherTexts,
        pictures: Sequence[Pictures],
        request: Request,
    ) -> Conditioning:
        """The language model does not see the pictures."""
        return _condition(encoders, prompts, request)


def load_flux2(parts: Parts) -> ImagePipeline:
    """The pipeline of FLUX.2's parts.

    Raises:
        FileNotFoundError: a component or a file is missing. ValueError: a file is damaged, or they do not fit together.
    """
    config = parts.denoiser_config(Flux2Config.from_entries, Flux2Config.from_shapes)
    scheduler = parts.scheduler_config(FlowMatchConfig.from_entries, SCHEDULER)
    kind, layers = _kind(parts, config), DEV_LAYERS if config.guided else KLEIN_LAYERS
    _check_widths(parts, config, len(layers))
    network = Flux2KVDenoiser if kind == "klein kv" else Flux2Denoiser
    denoiser = build_on_meta(lambda: network(config))
    source = WeightSource.for_module(denoiser, parts.denoiser_files, flux2_key_map())  # refuses a broken file first
    vae = parts.autoencoder(load_flux2_kl, load_flux2_kl_file, channels=config.latent_channels)
    read = partial(
        load_decoder_encoder,
        template=FLUX2 if config.guided else FLUX2_KLEIN,
        layers=tuple(Layer(index, normed=False) for index in layers),
        max_tokens=LONGEST,
        pad_to_max=True,
        attention=parts.attention,
    )
    encoder = parts.encoder("llm", read)
    denoiser.fill(source, device=parts.device, dtype=parts.dtype, block_device=parts.block_device)
    return ImagePipeline(
        source=Source(family=FAMILY, name=parts.name, weights=parts.digests(LAYOUT)),
        family=Flux2Family(scheduler=scheduler, kind=kind),
        editing=Flux2Editing(multiple=vae.downsampling),
        recipe=recipe(kind, downsampling=vae.downsampling),
        denoiser=denoiser,
        encoders={"llm": encoder},
        vae=vae,
        attention=parts.attention,
        device=parts.device,
        dtype=parts.dtype,
    )


def recipe(kind: Kind, *, downsampling: int = 16) -> Recipe:
    """The defaults of one kind; `downsampling` is the autoencoder's."""
    side = DEFAULT_CELLS * downsampling
    return Recipe(
        width=side,
        height=side,
        size_multiple=downsampling,
        min_size=downsampling,
        max_size=4 * side,
        num_inference_steps=STEPS if kind in FEW_STEPS else 50,
        guidance_scale=0.0 if kind in FEW_STEPS else 4.0,
        strength=0.8,
    )


def _kind(parts: Parts, config: Flux2Config) -> Kind:
    """dev is told a guidance value; the index of a klein's folder says whether it remembers pictures ("kv"), and
    whether it is distilled; a single file's name whether it does the one, and is not the other."""
    if config.guided:
        return "dev"
    name, index = parts.denoiser.name.lower(), parts.index_entries()
    remembers, distilled = "kv" in re.split(r"[-_.]", name), "base" not in name
    if parts.folder is not None:
        remembers, distilled = index.get("_class_name") == KV_PIPELINE, bool(index.get("is_distilled", False))
    if remembers:
        return "klein kv"
    return "klein" if distilled else "klein base"


def _condition(encoders: Mapping[str, TextEncoder], prompts: Sequence[str], request: Request) -> Conditioning:
    text = limited(encoders["llm"], request)(prompts)
    return conditioning_of(text)


def _check_widths(parts: Parts, config: Flux2Config, num_layers: int) -> None:
    """The parts belong together, by what their configs say."""
    folder = parts.encoders["llm"]
    width = config.text_width
    if isinstance(folder, ModelSource):
        width = num_layers * model_config(folder).width
    if width != config.text_width:
        raise ValueError(
            f"{folder} gives states of {width} at {num_layers} layers; the transformer needs {config.text_width}"
        )
    check_entries(((parts.vae, "latent_channels", config.latent_channels // PATCH**2),))
