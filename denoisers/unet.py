"""The UNets of Stable Diffusion 1.5, XL and XL's refiner: diffusers' `UNet2DConditionModel` behind our interface.

Latents are on the exploding path, x = x0 + sigma noise; the model reads them divided by sqrt(sigma^2 + 1), and predicts
the noise, v = (noise - sigma x0) / sqrt(sigma^2 + 1), or x0 itself.

Legend: B rows, E evaluations, C latent channels, h w latent cells, Lt text tokens, Dt text width, D width of the time
embedding, H heads, Dh width of a head.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.attention.base import FULL, AttentionCall, AttentionMask, AttentionSelector
from ..core.checkpoint import Files
from ..core.diffusers_config import made
from ..core.loading import build_on_meta, load_weights
from ..core.saving import Component, weights_of
from ..core.stream import Runner, Watching, run_blocks
from ..schedulers.base import Point
from ..schedulers.discrete import Prediction
from .base import Conditioning
from .fitting import check_guidance, check_states, text_mask
from .saving import stamped
from .unet_config import CLASS_NAME, UNetConfig
from .unet_keys import unet_key_map

NO_BLOCKS = "a UNet has none, its parts are of many sizes and are joined across levels"
GUIDANCE_SCALE = 1000.0  # that a told guidance value, less 1, is multiplied by before its sinusoid


@dataclass(frozen=True, kw_only=True, eq=False)
class UNetPrepared:
    """All that one run needs and that does not depend on the latents.

    `times[e]` [1 or B, D] is evaluation e's embedding, with what the model is told beside the text; `places[index]`
    finds e by a point's index. `text` holds keys and values [B, H, Lt, Dh] of every attention to the text, by its name;
    `beside` [B, C', h, w] is what is read on further channels. `watch` is shown what leaves each part, by its name.
    """

    times: Sequence[Tensor]
    places: Mapping[int, int]
    text: Mapping[str, tuple[Tensor, Tensor]]
    mask: AttentionMask
    attention: AttentionSelector
    beside: Tensor | None
    watch: Callable[[Tensor, str], None] | None


class UNetDenoiser(nn.Module):
    """See the module's first lines; implements `Denoiser`. Every token of the text up to a row's length is attended to.

    `unet` holds the weights, by diffusers' names; its own forward is not used. Conditioning has `pooled` and `time_ids`
    for models that are told numbers, `guidance` for those that are told a guidance value, and for models that read
    further channels one reference with these channels, of the latents' size.
    """

    def __init__(self, config: UNetConfig, prediction: Prediction = "epsilon") -> None:
        super().__init__()
        self.config = config
        self.prediction: Prediction = prediction
        self.unet = _module(config)

    def prepare(
        self,
        conditioning: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> UNetPrepared:
        """Everything for latents of `shape` [B, C, 1, h, w] at these points.

        Raises:
            ValueError: latents or conditioning of a shape or kind that the model does not take, or a runner that does
            more than look on.
        """
        watch = _watch(runner)
        self._check_fits(conditioning, shape)
        states, lengths = conditioning.states.to(self.dtype), conditioning.lengths
        return UNetPrepared(
            times=self.embed(conditioning, evaluations),
            places={point.index: e for e, point in enumerate(evaluations)},
            text={name: _keys_values(part, states) for name, part in self._text_attentions()},
            mask=text_mask(lengths, states.shape[1], 0),
            attention=attention,
            beside=conditioning.references[0][:, :, 0] if conditioning.references else None,
            watch=watch,
        )

    def slope(self, x: Tensor, prepared: UNetPrepared, point: Point) -> Tensor:
        """The noise, float32 [B, C, 1, h, w], at one of the points that were prepared."""
        scale = 1.0 / math.sqrt(point.sigma**2 + 1.0)
        latents = scale * x[:, :, 0]
        if prepared.beside is not None:
            latents = torch.cat((latents, prepared.beside), dim=1)
        time = prepared.times[prepared.places[point.index]]
        out = self._walk(latents.to(self.dtype), time, prepared).float()[:, :, None]
        if self.prediction == "sample":
            return (x - out) / point.sigma
        return out if self.prediction == "epsilon" else scale * (out + scale * point.sigma * x)

    def component(self) -> Component:
        """See `Saveable`."""
        return Component(entries=stamped(CLASS_NAME, self.config.entries()), weights=weights_of(self.unet))

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.unet.conv_in.weight.dtype

    def embed(self, conditioning: Conditioning, evaluations: Sequence[Point]) -> Sequence[Tensor]:
        """The embedding of time, and of what the model is told beside the text, for each point: [1 or B, D]."""
        unet, device = self.unet, conditioning.states.device
        times = torch.tensor([point.time for point in evaluations], dtype=torch.float32, device=device)
        guidance = conditioning.guidance
        told = None if guidance is None else guidance_embedding(guidance, self.config.time_cond_proj_dim or 0).to(times)
        sinusoids = unet.time_proj(times).to(self.dtype)
        embedded = unet.time_embedding(sinusoids, None if told is None else told.to(self.dtype))
        if not self.config.is_told_numbers:
            return embedded[:, None].unbind()
        assert conditioning.time_ids is not None
        assert conditioning.pooled is not None
        numbers = unet.add_time_proj(conditioning.time_ids.float().flatten()).view(conditioning.num_rows, -1)
        pooled = conditioning.pooled.to(self.dtype)
        return (embedded[:, None] + unet.add_embedding(torch.cat((pooled, numbers.to(self.dtype)), dim=1))).unbind()

    def _walk(self, x: Tensor, time: Tensor, prepared: UNetPrepared) -> Tensor:
        """The network's output for x [B, C, h, w], part by part."""
        unet, arguments = self.unet, {"cross_attention_kwargs": {"prepared": prepared}}
        _show(prepared, x, "the latents")
        x = unet.conv_in(x)
        skips: list[Tensor] = [x]
        for i, (block, kind) in enumerate(zip(unet.down_blocks, self.config.down_block_types, strict=True)):
            x, found = block(x, time, **(arguments if _reads_text(kind) else {}))
            skips.extend(found)
            _show(prepared, x, f"down block {i}")
        if unet.mid_block is not None:
            x = unet.mid_block(x, time, **arguments)
            _show(prepared, x, "the middle block")
        for i, (block, kind) in enumerate(zip(unet.up_blocks, self.config.up_block_types, strict=True)):
            count = len(block.resnets)
            taken, skips = tuple(skips[-count:]), skips[:-count]
            size = skips[-1].shape[2:] if skips else None  # of the level above, where it is no double
            x = block(x, taken, time, upsample_size=size, **(arguments if _reads_text(kind) else {}))
            _show(prepared, x, f"up block {i}")
        return unet.conv_out(unet.conv_act(unet.conv_norm_out(x)))

    def _text_attentions(self) -> Iterator[tuple[str, Any]]:
        """Every attention to the text, by its name."""
        for name, part in self.unet.named_modules():
            if name.endswith(".attn2"):
                yield name, part

    def _check_fits(self, conditioning: Conditioning, shape: tuple[int, ...]) -> None:
        config = self.config
        check_states(conditioning, shape[0], config.text_width)
        if shape[1] != config.out_channels or shape[2] != 1:
            raise ValueError(f"latents are {shape}; this model takes {config.out_channels} channels and one frame")
        check_guidance(conditioning, guided=config.time_cond_proj_dim is not None)
        wanted = [(shape[0], config.beside_channels, *shape[2:])] if config.beside_channels else []
        found = [tuple(latents.shape) for latents in conditioning.references]
        if found != wanted:
            raise ValueError(f"references are of shapes {found}; this model reads {wanted or 'none'}")
        self._check_told(conditioning)

    def _check_told(self, conditioning: Conditioning) -> None:
        config, pooled, numbers = self.config, conditioning.pooled, conditioning.time_ids
        if not config.is_told_numbers:
            return
        if pooled is None or numbers is None:
            raise ValueError("pooled or time_ids are missing; this model is told both")
        width = config.pooled_width(numbers.shape[1])
        if pooled.shape[1] != width:
            told = f"{numbers.shape[1]} time_ids and pooled text of width {pooled.shape[1]}"
            raise ValueError(f"the model is told {told}; beside so many numbers it reads pooled text of width {width}")


class PreparedAttention:
    """diffusers' attention processor over a run's own keys, values and attention backends; `name` is its layer's, None
    for attention of the picture to itself."""

    def __init__(self, name: str | None) -> None:
        self.name = name

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        prepared: UNetPrepared,
    ) -> Tensor:
        """The layer's output for tokens [B, L, D]; the states and the mask that diffusers passes on are None."""
        if self.name is None:
            (keys, values), mask = _keys_values(attn, hidden_states), FULL
        else:
            (keys, values), mask = prepared.text[self.name], prepared.mask
        queries = _heads(attn.to_q(hidden_states), attn.heads)
        call = AttentionCall(queries=queries, keys=keys, values=values, mask=mask, scale=attn.scale)
        return attn.to_out[0](prepared.attention(call).transpose(1, 2).flatten(2))


def guidance_embedding(value: float, width: int) -> Tensor:
    """The sinusoid [1, width] of a guidance value as latent consistency models are told it (Luo et al. 2023)."""
    half = width // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000.0) / (half - 1)))
    angles = (torch.tensor([value - 1.0], dtype=torch.float32) * GUIDANCE_SCALE)[:, None] * rates
    return nn.functional.pad(torch.cat((angles.sin(), angles.cos()), dim=1), (0, width % 2))


def load_unet(
    files: Files,
    config: UNetConfig,
    *,
    prediction: Prediction = "epsilon",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> UNetDenoiser:
    """The UNet of files in diffusers' layout or the original one, which hold nothing else.

    Everything is checked before anything is allocated.

    Raises:
        FileNotFoundError: a file is missing. ValueError: the config makes no sense, or the weights are damaged, or do
        not fit it.
    """
    denoiser = build_on_meta(lambda: UNetDenoiser(config, prediction))
    load_weights(denoiser.unet, files, unet_key_map(denoiser.unet, config), dtype=dtype, device=device)
    return denoiser.requires_grad_(False).eval()


def _module(config: UNetConfig) -> Any:
    """diffusers' module, with our attention. Raises ValueError for sizes that make none."""
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    build: Callable[..., Any] = UNet2DConditionModel
    unet = made(CLASS_NAME, lambda: build(**config.entries()))
    for name, part in unet.named_modules():
        if name.endswith((".attn1", ".attn2")):
            part.set_processor(PreparedAttention(name if name.endswith(".attn2") else None))
    return unet


def _watch(runner: Runner) -> Callable[[Tensor, str], None] | None:
    if isinstance(runner, Watching):
        return runner.look
    if runner is run_blocks:
        return None
    raise ValueError(f"this option walks a list of equal blocks (a runner); {NO_BLOCKS}")


def _show(prepared: UNetPrepared, x: Tensor, name: str) -> None:
    if prepared.watch is not None:
        prepared.watch(x, name)


def _reads_text(kind: str) -> bool:
    return kind.startswith("CrossAttn")


def _keys_values(attn: Any, states: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, L, Dh] of states [B, L, D]."""
    return _heads(attn.to_k(states), attn.heads), _heads(attn.to_v(states), attn.heads)


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, L, H Dh] to [B, H, L, Dh]."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)
