"""Causal few-step video written out over diffusers' Wan: no cache, but one pass over the whole clip so far, in which a
mask says what each chunk sees, and tokens of finished chunks are told time 0."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from parity import error
from torch import Tensor
from torch.nn import functional

from calotype.denoisers.base import Conditioning
from calotype.denoisers.causal import Chunks

SIGMAS = tuple(5 * share / (1 + 4 * share) for share in (1.0, 0.75, 0.5, 0.25))


def padded(told: Conditioning) -> Tensor:
    """Text states as diffusers' pipelines give them: cut to their lengths, then zeros up to 512."""
    rows = zip(told.states, told.lengths, strict=True)
    return torch.stack([functional.pad(states[:length], (0, 0, 0, 512 - int(length))) for states, length in rows])


def frames_seen(lengths: Sequence[int], chunks: Chunks) -> Tensor:
    """Which latent frames each one sees, [F, F]."""
    seen, start = torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool), 0
    for length in lengths:
        stop = start + length
        seen[start:stop, :stop] = True
        if chunks.window is not None:
            oldest = max(start - (chunks.window - chunks.sink - chunks.frames), 0)
            seen[start:stop, chunks.sink : oldest] = False
        start = stop
    return seen


def one_pass(
    model: Any, text: Tensor, clip: Tensor, times: Sequence[float], lengths: Sequence[int], chunks: Chunks
) -> Tensor:
    """The network's output for latents [B, C, F, h, w], whose chunks have these lengths and times."""
    from diffusers.models.transformers import transformer_wan

    area = clip.shape[3] * clip.shape[4] // 4
    seen = frames_seen(lengths, chunks).repeat_interleave(area, 0).repeat_interleave(area, 1)
    each = torch.tensor(times).repeat_interleave(torch.tensor(lengths) * area)
    original = transformer_wan.dispatch_attention_fn

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if key.shape[1] == len(seen):  # not the text's
            options["attn_mask"] = seen[None, None]
        return original(query, key, value, **options)

    with mock.patch.object(transformer_wan, "dispatch_attention_fn", attend):
        return model(
            hidden_states=clip,
            timestep=(1000 * each).expand(len(clip), -1),
            encoder_hidden_states=text,
            return_dict=False,
        )[0]


def four_steps(
    model: Any, text: Tensor, seeds: Sequence[int], begin: Tensor, lengths: Sequence[int], chunks: Chunks
) -> list[tuple[Tensor, Tensor]]:
    """By step, latents after it and the x0 it found, both with all before them, of a clip that begins with `begin`
    [B, C, f, h, w], whose chunks are among those of these lengths."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    clip, steps = begin, list[tuple[Tensor, Tensor]]()

    def drawn(length: int) -> Tensor:
        shape = (begin.shape[1], length, *begin.shape[3:])
        return torch.stack([torch.randn(shape, generator=generator) for generator in generators])

    for number, length in enumerate(lengths):
        if sum(lengths[:number]) < begin.shape[2]:
            continue
        x = drawn(length)
        for i, sigma in enumerate(SIGMAS):
            times = (*(0.0,) * number, sigma)
            whole = one_pass(model, text, torch.cat((clip, x), dim=2), times, lengths[: number + 1], chunks)
            x0 = x - sigma * whole[:, :, -length:]
            x = x0 if i == 3 else (1 - SIGMAS[i + 1]) * x0 + SIGMAS[i + 1] * drawn(length)
            steps.append((torch.cat((clip, x), dim=2), torch.cat((clip, x0), dim=2)))
        clip = torch.cat((clip, x0), dim=2)
    return steps


def compare(network: Any, pipe: Any, request: Any, seeds: Sequence[int], begin: Tensor) -> Any:
    """Every step of a request's clips, which begin with the latents `begin`, is the one that is written out; the last
    step."""
    encoded, chunks = pipe.encode(request), pipe.denoiser.chunks
    lengths = chunks.lengths(encoded.shape[2], begin.shape[2])
    wanted = four_steps(network, padded(encoded.conditioning.positive), seeds, begin, lengths, chunks)
    steps = list(pipe.denoise(encoded))
    assert len(steps) == len(wanted)
    for number, (step, (latents, denoised)) in enumerate(zip(steps, wanted, strict=True)):
        assert (step.index, step.total, step.chunk) == (number, len(wanted), number // 4)
        assert step.sigma == pytest.approx((*SIGMAS[1:], 0.0)[number % 4])
        assert error(step.latents, latents) < 1e-5
        assert error(step.denoised, denoised) < 1e-5
    return steps[-1]
