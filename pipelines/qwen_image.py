"""Qwen-Image.

Source: diffusers' QwenImagePipeline, QwenImageImg2ImgPipeline and QwenImageInpaintPipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..core.loading import build_on_meta
from ..core.weight_source import WeightSource
from ..denoisers.base import Conditioning
from ..denoisers.guidance import ClassifierFree, Guidance, TokenNorm, Unguided
from ..denoisers.qwen_image import MARKS, PATCH, QwenImageConfig, QwenImageDenoiser, qwen_image_key_map
from ..encoders.base import TextEncoder
from ..encoders.decoder import Layer, load_decoder_encoder
from ..encoders.in_files import QWEN2_5_VL
from ..encoders.templates import QWEN_IMAGE, QWEN_IMAGE_DROP
from ..language.checkpoints import ModelSource, model_config
from ..schedulers.flow_match import FlowMatchConfig
from ..vae.qwen_image import load_qwen_image_vae, load_qwen_image_vae_file
from .base import Source
from .distilled import check_not_told
from .family import COMMON
from .flow import FlowFamily
from .image import ImagePipeline
from .parts import EncoderLoader, Layout, Parts
from .recipe import Recipe
from .request import Request
from .text_options import check_text, conditioning_of, limited
from .texts import OtherTexts
from .true_cfg import has_negative, true_cfg_warnings

FAMILY = "qwen-image"
MAX_TOKENS, LONGEST = 512, 1024  # that are read where nothing is said, and at most
LAYOUT = Layout(
    classes=("QwenImagePipeline", "QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline"),
    encoders={"llm": "text_encoder"},
    tokenizers={"llm": "tokenizer"},
    marks=MARKS,
    inside={"llm": (QWEN2_5_VL,)},
)
SCHEDULER = FlowMatchConfig(
    use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
)
"""For files that have none."""
DEFAULT_CELLS = 128  # latent cells a side of a picture whose size is not given


@dataclass(frozen=True, kw_only=True)
class QwenImageFamily(FlowFamily):
    """Qwen-Image's choices.

    With a negative prompt, a scale over 1 is classifier-free guidance, one pass after the other, whose tokens are then
    made as long as those of the prompt's pass. The scale is `true_cfg_scale` or, the same, `guidance_scale`.
    """

    @property
    def arguments(self) -> frozenset[str]:
        """All common ones, and these."""
        return COMMON | {"true_cfg_scale", "max_sequence_length"}

    def check(self, request: Request) -> None:
        """The length is within what the model was made for, there is one scale, and no value to be told."""
        check_text(request, longest=LONGEST)
        if request.guidance_scale is not None and request.true_cfg_scale is not None:
            raise ValueError("guidance_scale and true_cfg_scale are the same for this model; give one of the two")
        check_not_told(request)

    def guidance(self, request: Request, recipe: Recipe) -> Guidance:
        """Classifier-free guidance where it is asked for."""
        if request.guidance is not None:
            return request.guidance
        _, given = _scale(request)
        scale = float(recipe.guidance_scale if given is None else given)
        if scale <= 1 or not has_negative(request):
            return Unguided()
        return ClassifierFree(scale, batched=False, renormalise=TokenNorm(PATCH))

    def condition(
        self, encoders: Mapping[str, TextEncoder], prompts: Sequence[str], others: OtherTexts, request: Request
    ) -> Conditioning:
        """The language model's last states of the prompts in their template."""
        text = limited(encoders["llm"], request)(prompts)
        return conditioning_of(text)

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What a scale does not do here."""
        return true_cfg_warnings(request, *_scale(request))


def load_qwen_image(parts: Parts) -> ImagePipeline:
    """The pipeline of Qwen-Image's parts.

    Raises:
        FileNotFoundError: a component or a file is missing. ValueError: a file is damaged, or they do not fit together.
    """
    read = partial(
        load_decoder_encoder,
        template=QWEN_IMAGE,
        layers=(Layer(-1, normed=True),),
        max_tokens=MAX_TOKENS,
        drop=QWEN_IMAGE_DROP,
        attention=parts.attention,
    )
    return pipeline_of(parts, LAYOUT, FAMILY, QwenImageFamily, read)


def pipeline_of(
    parts: Parts, layout: Layout, name: str, family: type[QwenImageFamily], encoder: EncoderLoader
) -> ImagePipeline:
    """The pipeline of parts in `layout`, of a `family` called `name` whose texts `encoder` reads. Errors as for
    `load_qwen_image`."""
    config = parts.denoiser_config(QwenImageConfig.from_entries, QwenImageConfig.from_shapes)
    scheduler = parts.scheduler_config(FlowMatchConfig.from_entries, SCHEDULER)
    _check_width(parts, config)
    denoiser = build_on_meta(lambda: QwenImageDenoiser(config))
    source = WeightSource.for_module(denoiser, parts.denoiser_files, qwen_image_key_map())  # refuses broken files
    vae = parts.autoencoder(load_qwen_image_vae, load_qwen_image_vae_file, channels=config.latent_channels)
    llm = parts.encoder("llm", encoder)
    denoiser.fill(source, device=parts.device, dtype=parts.dtype, block_device=parts.block_device)
    return ImagePipeline(
        source=Source(family=name, name=parts.name, weights=parts.digests(layout)),
        family=family(scheduler=scheduler),
        recipe=recipe(vae.downsampling),
        denoiser=denoiser,
        encoders={"llm": llm},
        vae=vae,
        attention=parts.attention,
        device=parts.device,
        dtype=parts.dtype,
    )


def _check_width(parts: Parts, config: QwenImageConfig) -> None:
    """Makes sure that the denoiser reads what the language model gives. ValueError otherwise."""
    folder = parts.encoders["llm"]
    if isinstance(folder, ModelSource) and model_config(folder).width != config.text_width:
        found = model_config(folder).width
        raise ValueError(f"{folder} has states of {found} channels; the transformer needs {config.text_width}")


def recipe(downsampling: int = 8) -> Recipe:
    """The reference's defaults; `downsampling` is the autoencoder's."""
    side = DEFAULT_CELLS * downsampling
    return Recipe(
        width=side,
        height=side,
        size_multiple=PATCH * downsampling,
        min_size=PATCH * downsampling,
        max_size=4 * side,
        num_inference_steps=50,
        guidance_scale=4.0,
        strength=0.6,
    )


def _scale(request: Request) -> tuple[str, float | None]:
    """The one scale that is given, with its name."""
    if request.guidance_scale is not None:
        return "guidance_scale", request.guidance_scale
    return "true_cfg_scale", request.true_cfg_scale
