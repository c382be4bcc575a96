"""The sizes of a UNet of Stable Diffusion, and reading them from diffusers' config.json."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ..core.diffusers_config import FLAG, SIZE, WORD, Kind, is_size

FILE, CLASS_NAME = "unet/config.json", "UNet2DConditionModel"
BLOCKS = ("DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D", "UNetMidBlock2DCrossAttn")
_Sizes = int | tuple[Any, ...]
_DOWN = ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D")
_UP = ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D")


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """diffusers' entries by diffusers' names, with its defaults; those of other kinds of UNet are not among them.

    `sample_size` are the latent cells a side of a picture whose size is not given. `addition_embed_type` "text_time"
    (SDXL): the model is told pooled text, and numbers that describe the picture, each as a sinusoid of
    `addition_time_embed_dim`; `projection_class_embeddings_input_dim` is the width of both. `time_cond_proj_dim`: it is
    told a guidance value (latent consistency models). `in_channels` over `out_channels`: it reads further latents
    beside those to denoise.

    Raises ValueError for entries that contradict each other.
    """

    in_channels: int = 4
    out_channels: int = 4
    sample_size: int | None = None
    flip_sin_to_cos: bool = True
    freq_shift: int = 0
    down_block_types: tuple[str, ...] = _DOWN
    mid_block_type: str | None = "UNetMidBlock2DCrossAttn"
    up_block_types: tuple[str, ...] = _UP
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    layers_per_block: _Sizes = 2
    downsample_padding: int = 1
    mid_block_scale_factor: float = 1
    act_fn: str = "silu"
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    cross_attention_dim: _Sizes = 1280
    transformer_layers_per_block: _Sizes = 1
    reverse_transformer_layers_per_block: tuple[Any, ...] | None = None
    attention_head_dim: _Sizes = 8
    num_attention_heads: _Sizes | None = None
    use_linear_projection: bool = False
    addition_embed_type: str | None = None
    addition_time_embed_dim: int | None = None
    upcast_attention: bool = False
    resnet_time_scale_shift: str = "default"
    resnet_skip_time_act: bool = False
    resnet_out_scale_factor: float = 1.0
    time_embedding_dim: int | None = None
    timestep_post_act: str | None = None
    time_cond_proj_dim: int | None = None
    conv_in_kernel: int = 3
    conv_out_kernel: int = 3
    projection_class_embeddings_input_dim: int | None = None

    def __post_init__(self) -> None:
        for name in (*self.down_block_types, *self.up_block_types, self.mid_block_type):
            if name is not None and name not in BLOCKS:
                raise ValueError(f"a block is {name!r}; known are {', '.join(BLOCKS)}")
        if self.addition_embed_type not in (None, "text_time"):
            raise ValueError(f"addition_embed_type is {self.addition_embed_type!r}; it must be null or 'text_time'")
        if self.is_told_numbers and not (self.addition_time_embed_dim and self.projection_class_embeddings_input_dim):
            raise ValueError("addition_embed_type is 'text_time', but the widths of what the model is told are missing")
        if self.in_channels < self.out_channels:
            raise ValueError(f"in_channels is {self.in_channels}; it must be at least out_channels {self.out_channels}")

    @property
    def beside_channels(self) -> int:
        """Channels that the model reads beside the latents."""
        return self.in_channels - self.out_channels

    @property
    def is_told_numbers(self) -> bool:
        """Whether it reads pooled text and numbers about the picture."""
        return self.addition_embed_type is not None

    @property
    def text_width(self) -> int:
        """The width of the text's states. Raises ValueError where its parts read several."""
        widths = (self.cross_attention_dim,) if isinstance(self.cross_attention_dim, int) else self.cross_attention_dim
        if len(set(widths)) != 1:
            raise ValueError(f"cross_attention_dim is {list(widths)}; one width for all is supported")
        return widths[0]

    def pooled_width(self, num_time_ids: int) -> int:
        """The width of the pooled text, of a model that is told so many numbers."""
        return (self.projection_class_embeddings_input_dim or 0) - num_time_ids * (self.addition_time_embed_dim or 0)

    def entries(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        return dataclasses.asdict(self)


def unet_config(entries: Mapping[str, object]) -> UNetConfig:
    """The config that the entries of a config.json say.

    Raises:
        ValueError: that is not the config of such a UNet, or has an entry of another type, or one that changes what the
        model does in a way there is nothing for here.
    """
    name = entries.get("_class_name", CLASS_NAME)
    if name != CLASS_NAME:
        raise ValueError(f"{FILE}: _class_name is {name!r}; this model is a {CLASS_NAME!r}")
    values: dict[str, Any] = {}
    for key, value in entries.items():
        if key in _KINDS and (value is not None or key in _MAY_BE_NULL):
            values[key] = _checked(key, value)
        elif value is not None and not key.startswith("_") and value not in _NEUTRAL.get(key, (False,)):
            raise ValueError(f"{FILE}: {key} is {value!r}; there is nothing for that here")
    return UNetConfig(**values)


# Values of entries that other kinds of UNet have, with which they do nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "dropout": (0.0, 0),
    "addition_embed_type_num_heads": (64,),
    "time_embedding_type": ("positional",),
    "attention_type": ("default",),
}


def _checked(key: str, value: object) -> object:
    """`value`, lists as tuples, if it is of the field's kind."""
    found, (what, fits) = _tuples(value), _KINDS[key]
    if not (fits(found) or (found is None and key in _MAY_BE_NULL)):
        raise ValueError(f"{FILE}: {key} is {value!r}; it must be {what}")
    return found


def _tuples(value: object) -> object:
    return tuple(map(_tuples, _items(value))) if isinstance(value, list | tuple) else value


def _items(value: object) -> list[object]:
    return list(cast(list[object], value))


def _are_sizes(value: object) -> bool:
    """A tuple of sizes, or of tuples of such."""
    return isinstance(value, tuple) and all(is_size(item) or _are_sizes(item) for item in _items(cast(object, value)))


def _are_words(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) for item in _items(cast(object, value)))


_SIZES: Kind = ("a list of whole numbers over 0", _are_sizes)
_ONE_OR_MORE: Kind = ("a whole number over 0, or a list of such", lambda value: is_size(value) or _are_sizes(value))
_NUMBER: Kind = ("a number", lambda value: type(value) in (int, float))
_WORDS: Kind = ("a list of words", _are_words)
_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("in_channels", "out_channels", "sample_size", "norm_num_groups", "downsample_padding"), SIZE),
    **dict.fromkeys(("addition_time_embed_dim", "projection_class_embeddings_input_dim", "time_embedding_dim"), SIZE),
    **dict.fromkeys(("time_cond_proj_dim", "conv_in_kernel", "conv_out_kernel"), SIZE),
    **dict.fromkeys(("block_out_channels", "reverse_transformer_layers_per_block"), _SIZES),
    **dict.fromkeys(("layers_per_block", "cross_attention_dim", "transformer_layers_per_block"), _ONE_OR_MORE),
    **dict.fromkeys(("attention_head_dim", "num_attention_heads"), _ONE_OR_MORE),
    **dict.fromkeys(("freq_shift", "mid_block_scale_factor", "norm_eps", "resnet_out_scale_factor"), _NUMBER),
    **dict.fromkeys(("flip_sin_to_cos", "use_linear_projection", "upcast_attention", "resnet_skip_time_act"), FLAG),
    **dict.fromkeys(("mid_block_type", "act_fn", "addition_embed_type", "resnet_time_scale_shift"), WORD),
    **dict.fromkeys(("timestep_post_act",), WORD),
    **dict.fromkeys(("down_block_types", "up_block_types"), _WORDS),
}
_MAY_BE_NULL = ("mid_block_type", *(field.name for field in dataclasses.fields(UNetConfig) if field.default is None))

SD_1 = UNetConfig(sample_size=64, cross_attention_dim=768)
"""Stable Diffusion 1.5."""
SDXL = UNetConfig(
    sample_size=128,
    block_out_channels=(320, 640, 1280),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    transformer_layers_per_block=(1, 2, 10),
    attention_head_dim=(5, 10, 20),
    cross_attention_dim=2048,
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=256,
    projection_class_embeddings_input_dim=2816,
)
"""Stable Diffusion XL, base."""
SDXL_REFINER = dataclasses.replace(
    SDXL,
    block_out_channels=(384, 768, 1536, 1536),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    transformer_layers_per_block=4,
    attention_head_dim=(6, 12, 24, 24),
    cross_attention_dim=1280,
    projection_class_embeddings_input_dim=2560,
)
"""Stable Diffusion XL's refiner."""
