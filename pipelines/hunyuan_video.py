"""HunyuanVideo 1.5: clips from text, and from pictures that they begin with.

Which of the two a folder's model does is told by its model_index.json; a single file's is taken to begin with pictures
where a picture encoder comes with it. Where a clip has no whole number of groups of frames after its first, the rest of
the last one is cut off.

Source: diffusers' HunyuanVideo15Pipeline and HunyuanVideo15ImageToVideoPipeline.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..core.copies import moved
from ..core.loading import build_on_meta
from ..core.weight_source import WeightSource
from ..denoisers.base import Conditioning
from ..denoisers.guidance import ClassifierFree, Guidance
from ..denoisers.hunyuan_video import HunyuanVideoDenoiser
from ..denoisers.hunyuan_video_config import MARKS, HunyuanVideoConfig
from ..denoisers.hunyuan_video_keys import hunyuan_video_key_map
from ..encoders.base import TextEncoder
from ..encoders.decoder import Layer, load_decoder_encoder
from ..encoders.hunyuan_video import HUNYUAN_VIDEO, HUNYUAN_VIDEO_DROP, load_glyph_encoder
from ..encoders.in_files import BYT5, QWEN2_5_VL
from ..encoders.siglip_vision import load_siglip_vision
from ..language.checkpoints import ModelSource, model_config
from ..schedulers import Schedule
from ..schedulers.flow_match import FlowMatchConfig, flow_match_schedule
from ..schedulers.spacing import even
from ..vae.base import Autoencoder
from ..vae.hunyuan_video import load_hunyuan_video_vae, load_hunyuan_video_vae_file
from .base import Source
from .distilled import check_not_told
from .family import COMMON, OF_CLIPS, STARTING, guidance_rescale, guidance_scale, num_steps
from .flow import late_steps, without_zero
from .folders import check_entries
from .hunyuan_guider import GUIDER_CONFIG, Guider
from .hunyuan_pictures import CroppedBeside, closest_size
from .image import ImagePipeline
from .parts import ClipSize, Layout, Parts
from .recipe import Recipe
from .request import Request
from .text_options import check_text, conditioning_given, conditioning_of, limited, options_given
from .texts import OtherTexts

FAMILY = "hunyuan_video"
GUIDER, PICTURES, PROCESSOR = "guider", "image_encoder", "feature_extractor"
FROM_TEXT, FROM_PICTURES = "HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"
LAYOUT = Layout(
    classes=(FROM_TEXT, FROM_PICTURES),
    encoders={"llm": "text_encoder", "byt5": "text_encoder_2"},
    tokenizers={"llm": "tokenizer", "byt5": "tokenizer_2"},
    pictures=(PICTURES, PROCESSOR),
    configs={GUIDER: GUIDER_CONFIG},
    marks=MARKS,
    inside={"llm": (QWEN2_5_VL,), "byt5": (BYT5,)},
    clip=lambda shapes: ClipSize(width=848, height=480, frames=FRAMES, group=4, side=16),
)
SCHEDULER = FlowMatchConfig(shift=5.0)
"""For files that have none: what the models for 480p are run with."""
MAX_TOKENS = 1000  # of a prompt in its template, after what is dropped
READ_LAYER = Layer(-3, normed=False)
LARGEST, FRAMES = 4096, 121
FEW_STEPS = 12  # of the models that are told where a step leads to


@dataclass(frozen=True, kw_only=True)
class HunyuanVideoFamily:
    """HunyuanVideo 1.5's choices: classifier-free guidance, one pass after the other, at any scale but 1. `begins`:
    clips begin with a picture. `meanflow`: the model is told where a step leads to."""

    scheduler: FlowMatchConfig
    guider: Guider = Guider()  # noqa: RUF009 (immutable)
    begins: bool = False
    meanflow: bool = False

    @property
    def arguments(self) -> frozenset[str]:
        """All common ones but those for starting from a picture, and these."""
        own = {"max_sequence_length", "guidance_rescale"} | ({"image"} if self.begins else set[str]())
        return (COMMON - STARTING) | OF_CLIPS | own

    @property
    def draws_posterior(self) -> bool:
        """The reference takes the mean."""
        return False

    def check(self, request: Request) -> None:
        """The length is within what the model was made for; guidance tells no value, and goes through all steps where
        the model is told these; conditioning that is given has the second encoder's states."""
        check_text(request, longest=MAX_TOKENS)
        check_not_told(request)
        given = request.guidance
        if self.meanflow and isinstance(given, ClassifierFree) and given.interval != (0.0, 1.0):
            raise ValueError(f"guidance is {given}; this model is told where steps lead to, so it guides all or none")
        if any(part.other_states is None for part in conditioning_given(request)):
            raise ValueError("conditioning: this model also reads other_states, those of texts in quotes")

    def guidance(self, request: Request, recipe: Recipe) -> Guidance:
        """u + scale (c - u)."""
        if request.guidance is not None:
            return request.guidance
        scale, rescale = guidance_scale(request, recipe), guidance_rescale(request, recipe)
        return ClassifierFree(scale, batched=False, rescale=rescale)

    def schedule(self, request: Request, recipe: Recipe, num_cells: int) -> Schedule:
        """Equal steps from 1 to 0, or the given sigmas, shifted as the scheduler's config says."""
        count = num_steps(request, recipe)
        sigmas = even(1.0, 0.0, count + 1)[:-1] if request.sigmas is None else without_zero(request.sigmas)
        return flow_match_schedule(self.scheduler, len(sigmas), sigmas=sigmas)

    def late(self, schedule: Schedule, strength: float) -> Schedule:
        """All but the first `int(n - n strength)` steps."""
        return late_steps(schedule, strength)

    def condition(
        self, encoders: Mapping[str, TextEncoder], prompts: Sequence[str], others: OtherTexts, request: Request
    ) -> Conditioning:
        """The language model's states of the prompts in their template, and ByT5's of what is in quotes."""
        text, glyphs = limited(encoders["llm"], request)(prompts), encoders["byt5"](prompts)
        return dataclasses.replace(
            conditioning_of(text),
            other_states=glyphs.states.to(text.states),
            other_lengths=glyphs.lengths.to(text.lengths),
            warnings=tuple(dict.fromkeys((*text.warnings, *glyphs.warnings))),
        )

    def index(self) -> Mapping[str, Any]:
        """See `IndexedFamily`."""
        return {"_class_name": FROM_PICTURES if self.begins else FROM_TEXT}

    def configs(self) -> Mapping[str, Mapping[str, Any]]:
        """See `ConfiguredFamily`."""
        return {GUIDER: self.guider.entries()}

    def described(self, request: Request) -> Mapping[str, Any]:
        """The length, where it is given."""
        return options_given(request, "max_sequence_length")

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What the model was not made for."""
        scale = request.guidance_scale
        if self.guider.scale != 1 or scale is None or scale == 1:
            return ()
        return (f"guidance_scale {scale}: this model was made to run without guidance, at 1",)


def load_hunyuan_video(parts: Parts) -> ImagePipeline:
    """The pipeline of HunyuanVideo 1.5's parts.

    Raises:
        FileNotFoundError: a component or a file is missing. ValueError: a file is damaged, or they do not fit together.
    """
    config = parts.denoiser_config(HunyuanVideoConfig.from_entries, HunyuanVideoConfig.from_shapes)
    scheduler = parts.scheduler_config(FlowMatchConfig.from_entries, SCHEDULER)
    guided = parts.config_entries(GUIDER, LAYOUT)
    guider = Guider() if guided is None else Guider.from_entries(guided)
    _check_texts(parts, config)
    denoiser = build_on_meta(lambda: HunyuanVideoDenoiser(config))
    source = WeightSource.for_module(denoiser, parts.denoiser_files, hunyuan_video_key_map())  # refuses broken files
    vae = parts.autoencoder(load_hunyuan_video_vae, load_hunyuan_video_vae_file, channels=config.latent_channels)
    looking = _looking(parts, config, vae)
    llm = partial(
        load_decoder_encoder,
        template=HUNYUAN_VIDEO,
        layers=(READ_LAYER,),
        max_tokens=MAX_TOKENS,
        drop=HUNYUAN_VIDEO_DROP,
        attention=parts.attention,
    )
    encoders = {"llm": parts.encoder("llm", llm), "byt5": parts.encoder("byt5", load_glyph_encoder)}
    denoiser.fill(source, device=parts.device, dtype=parts.dtype, block_device=parts.block_device)
    return ImagePipeline(
        source=Source(family=FAMILY, name=parts.name, weights=parts.digests(LAYOUT)),
        family=HunyuanVideoFamily(
            scheduler=scheduler, guider=guider, begins=looking is not None, meanflow=config.meanflow
        ),
        recipe=recipe(config, guider, vae.downsampling),
        denoiser=denoiser,
        encoders=encoders,
        vae=vae,
        attention=parts.attention,
        looking=looking,
        device=parts.device,
        dtype=parts.dtype,
    )


def recipe(config: HunyuanVideoConfig, guider: Guider, downsampling: int = 16) -> Recipe:
    """The reference's defaults, but for the steps of models that are told where these lead to; `downsampling` is the
    autoencoder's."""
    width, height = closest_size(16, 9, config.target_size, downsampling)
    unit = config.patch * downsampling
    return Recipe(
        width=width,
        height=height,
        size_multiple=unit,
        min_size=unit,
        max_size=LARGEST,
        num_inference_steps=FEW_STEPS if config.meanflow else 50,
        guidance_scale=guider.scale,
        guidance_rescale=guider.rescale,
        num_frames=FRAMES,
        fps=24,
    )


def _check_texts(parts: Parts, config: HunyuanVideoConfig) -> None:
    """Makes sure that the denoiser reads what the text encoders give. ValueError otherwise."""
    llm = parts.encoders["llm"]
    if isinstance(llm, ModelSource) and model_config(llm).width != config.text_width:
        found = model_config(llm).width
        raise ValueError(f"{llm} has states of {found} channels; the transformer needs {config.text_width}")
    check_entries([(parts.encoders["byt5"], "d_model", config.glyph_width)])


def _looking(parts: Parts, config: HunyuanVideoConfig, vae: Autoencoder) -> CroppedBeside | None:
    """How pictures are seen, where clips begin with such."""
    begins = PICTURES in parts.others if parts.folder is None else parts.index_entries()["_class_name"] == FROM_PICTURES
    if not begins:
        return None
    if PICTURES not in parts.others:
        raise FileNotFoundError(
            f"{parts.name} has no folder {PICTURES!r}, which a model that begins with pictures needs"
        )
    place = parts.others[PICTURES]
    check_entries([(place, "hidden_size", config.picture_width)])
    encoder = load_siglip_vision(
        place,
        place.parent / PROCESSOR,
        variant=parts.variant_of(place),
        device=parts.encoder_device,
        dtype=parts.dtype,
    )
    encoder = moved(encoder, parts.device, None)  # where weights that stay in their files will go
    return CroppedBeside(encoder=encoder, target=config.target_size, unit=vae.downsampling)
