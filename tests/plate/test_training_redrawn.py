"""Scenes that the denoiser draws again: their layout stays, and the decoder's training reads them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import calotype
from calotype.pipelines.image import ImagePipeline
from calotype.plate.training import redrawn
from calotype.plate.training.autoencoder import with_redrawn
from calotype.vae.plate import PlateVAE


@pytest.fixture(scope="module")
def pipe() -> ImagePipeline:
    return calotype.load()


@pytest.fixture(scope="module")
def shard(pipe: ImagePipeline) -> redrawn.Redrawn:
    return redrawn.make_shard(pipe, seed=3, index=0, count=16)


def test_latents_stand_for_the_pixels_beside_them(pipe: ImagePipeline, shard: redrawn.Redrawn) -> None:
    assert shard.pixels.shape == (16, 3, 64, 64)
    assert shard.pixels.dtype is torch.uint8
    assert shard.latents.shape == (16, 8, 8, 8)
    pictures = pipe.vae.decode(shard.latents.float()[:, :, None])[:, :, 0]
    true = shard.pixels.float() / 127.5 - 1
    errors = (pictures[:, None] - true).square().flatten(2).mean(2)
    assert errors.argmin(0).tolist() == list(range(16))  # each is nearest to its own
    assert float(errors.diagonal().mean()) < 0.03


def test_a_shard_repeats_with_its_seed(pipe: ImagePipeline, shard: redrawn.Redrawn) -> None:
    again = redrawn.make_shard(pipe, seed=3, index=0, count=16)
    assert torch.equal(again.latents, shard.latents)
    assert torch.equal(again.pixels, shard.pixels)


def test_half_of_a_batch_is_replaced(pipe: ImagePipeline, shard: redrawn.Redrawn, tmp_path: Path) -> None:
    assert isinstance(pipe.vae, PlateVAE)
    save_file({"pixels": shard.pixels, "latents": shard.latents}, tmp_path / "redrawn-0000.safetensors")
    read = redrawn.read_redrawn(tmp_path)
    latents, pixels = torch.zeros(6, 8, 8, 8), torch.zeros(6, 3, 64, 64)
    mixed, targets = with_redrawn(pipe.vae, latents, pixels, read, np.random.default_rng(0))
    assert not mixed[:3].any()
    assert not targets[:3].any()
    for row in range(3, 6):
        source = next(n for n in range(16) if torch.equal(shard.pixels[n].float() / 127.5 - 1, targets[row]))
        decoded = pipe.vae.decoder(mixed[row : row + 1])
        expected = pipe.vae.decode(shard.latents[source : source + 1].float()[:, :, None])[:, :, 0]
        assert torch.allclose(decoded, expected, atol=1e-5)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no redrawn-"):
        redrawn.read_redrawn(tmp_path)
