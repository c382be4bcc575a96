"""Stand-ins for trained parts: an analytic denoiser, a text encoder, an autoencoder, and a pipeline of them."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from calotype.core.attention.base import AttentionMask, AttentionSelector
from calotype.core.attention.sdpa import SDPAAttention
from calotype.core.rotary import Rotary, RotaryConfig, rotary_table
from calotype.core.stream import BlockInputs, Cache, NoCache, Runner, Stream, run_blocks
from calotype.denoisers.base import Conditioning
from calotype.denoisers.guidance import Unguided
from calotype.encoders.base import EncodedText
from calotype.pipelines.base import Source
from calotype.pipelines.family import PlainFamily
from calotype.pipelines.image import ImagePipeline
from calotype.pipelines.manifest import Manifest
from calotype.pipelines.recipe import Recipe
from calotype.schedulers import Euler, flow_schedule
from calotype.schedulers.base import Point

CHANNELS, CELL, WIDTH = 4, 8, 6


@dataclass(frozen=True, kw_only=True)
class FakePrepared:
    text: Tensor
    inputs: BlockInputs
    runner: Runner
    points: frozenset[int]


class ScaleBlock:
    """x + gain tanh(x); `poison` makes its output NaN where sigma is below it."""

    def __init__(self, gain: float) -> None:
        self.gain = gain
        self.poison = False

    def __call__(self, stream: Stream, prepared: BlockInputs, cache: Cache, i: int) -> Stream:
        x = stream.x + self.gain * torch.tanh(stream.x)
        return Stream(x=torch.full_like(x, torch.nan) if self.poison else x)


class FakeDenoiser:
    """The slope of a Gaussian whose mean depends on the prompt, put through a few blocks. Counts its calls."""

    def __init__(self) -> None:
        self.blocks = [ScaleBlock(0.1), ScaleBlock(-0.05), ScaleBlock(0.02)]
        self.rows: list[int] = []
        self.prepares: list[int] = []
        self.poison_below: float = -1.0
        self.poisoned_block: int | None = None

    def prepare(
        self,
        conditioning: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> FakePrepared:
        assert conditioning.num_rows == shape[0]
        self.prepares.append(shape[0])
        index = torch.arange(conditioning.states.shape[1])
        valid = (index < conditioning.lengths[:, None])[..., None]
        text = (conditioning.states.float() * valid).sum(1) / conditioning.lengths[:, None]
        rotary: Rotary = rotary_table(RotaryConfig(axes=(4,)), torch.zeros(1, 1, dtype=torch.int64))
        inputs = BlockInputs(rotary=rotary, mask=AttentionMask(), attention=attention)
        points = frozenset(point.index for point in evaluations)
        return FakePrepared(text=text[:, :CHANNELS], inputs=inputs, runner=runner, points=points)

    def slope(self, x: Tensor, prepared: FakePrepared, point: Point) -> Tensor:
        assert point.index in prepared.points
        assert x.dtype == torch.float32
        self.rows.append(x.shape[0])
        for index, block in enumerate(self.blocks):
            block.poison = index == self.poisoned_block and point.sigma < self.poison_below
        mean = prepared.text[:, :, None, None, None]
        variance = point.alpha**2 * 0.25 + point.sigma**2
        d = (x - point.alpha * mean) * (point.sigma - point.alpha * 0.25) / variance - mean
        stream = prepared.runner(self.blocks, Stream(x=d.flatten(2)), prepared.inputs, NoCache())
        d = stream.x.unflatten(2, x.shape[2:])
        broken = self.poisoned_block is None and point.sigma < self.poison_below
        return torch.full_like(d, torch.inf) if broken else d


class FakeEncoder:
    """States that are a hash of each word; keeps what it was asked, cuts prompts after 8 words."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, prompts: Sequence[str]) -> EncodedText:
        self.asked.append(tuple(prompts))
        words = [["<bos>", *prompt.split()][:9] for prompt in prompts]
        warnings = tuple(f"{prompt!r} was cut" for prompt in prompts if len(prompt.split()) > 8)
        longest = max(len(row) for row in words)
        states = torch.zeros(len(prompts), longest, WIDTH)
        for b, row in enumerate(words):
            states[b, : len(row)] = torch.stack([_word(word) for word in row])
        return EncodedText(states=states, lengths=torch.tensor([len(row) for row in words]), warnings=warnings)


class FakeVAE:
    """Means over cells of 8x8 pixels and their inverse; the fourth channel is zero. Counts its decodes."""

    latent_channels = CHANNELS
    downsampling = CELL

    def __init__(self) -> None:
        self.decodes = 0
        self.broken = False

    def encode(self, pixels: Tensor) -> Tensor:
        cells = functional.avg_pool3d(pixels, (1, CELL, CELL))
        return torch.cat((cells, torch.zeros_like(cells[:, :1])), dim=1)

    def decode(self, latents: Tensor) -> Tensor:
        self.decodes += 1
        pixels = latents[:, :3].repeat_interleave(CELL, 3).repeat_interleave(CELL, 4)
        return pixels * torch.nan if self.broken else pixels


def selector() -> AttentionSelector:
    return AttentionSelector(backends=(SDPAAttention(),))


def fake_pipeline() -> ImagePipeline:
    return ImagePipeline(
        source=Source(family="fake", name="fake", weights={}),
        recipe=Recipe(width=32, height=32, num_inference_steps=4),
        denoiser=FakeDenoiser(),
        encoders={"llm": FakeEncoder()},
        vae=FakeVAE(),
        attention=selector(),
    )


@dataclass(frozen=True)
class ClipFamily(PlainFamily):
    """A family that makes clips."""

    @property
    def arguments(self) -> frozenset[str]:
        return super().arguments | {"num_frames"}


def fake_clip_pipeline() -> ImagePipeline:
    """Clips of 3 frames, 8 in a second."""
    recipe = Recipe(width=32, height=32, num_inference_steps=2, num_frames=3, fps=8)
    return dataclasses.replace(fake_pipeline(), family=ClipFamily(), recipe=recipe)


def _word(word: str) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


def text_to_image_manifest(prompts: Sequence[str], seeds: Sequence[int], width: int = 16) -> Manifest:
    """The manifest of a run of two unguided Euler steps that made pictures of 16 rows."""
    return Manifest.build(
        family="plate",
        model="plate",
        weights={},
        task="text-to-image",
        prompts=prompts,
        negative_prompts=None,
        seeds=seeds,
        width=width,
        height=16,
        schedule=flow_schedule(2),
        sampler=Euler(),
        guidance=Unguided(),
        strength=None,
        inputs={},
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention="sdpa",
    )
