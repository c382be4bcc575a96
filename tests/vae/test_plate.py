"""The autoencoder of plate, tiny and with random weights."""

import pytest
import torch

from calotype.vae.plate import PlateVAE, PlateVAEConfig


@pytest.fixture
def vae() -> PlateVAE:
    torch.manual_seed(0)
    config = PlateVAEConfig(encoder_widths=(8, 8), decoder_widths=(8, 8, 8), decoder_blocks=(1, 1, 1))
    model = PlateVAE(config).requires_grad_(False)
    model.latent_mean.copy_(torch.randn(8))
    model.latent_std.copy_(torch.rand(8) + 0.5)
    return model


def test_a_clip_is_its_frames(vae: PlateVAE) -> None:
    clip = torch.randn(2, 3, 3, 16, 24)
    latents = vae.encode(clip)
    assert latents.shape == (2, vae.latent_channels, 3, 16 // vae.downsampling, 24 // vae.downsampling)
    pixels = vae.decode(latents)
    assert pixels.shape == clip.shape
    for frame in range(3):
        torch.testing.assert_close(latents[:, :, frame], vae.encode(clip[:, :, frame : frame + 1])[:, :, 0])
        torch.testing.assert_close(pixels[:, :, frame], vae.decode(latents[:, :, frame : frame + 1])[:, :, 0])


def test_normalising_is_per_channel_and_comes_back(vae: PlateVAE) -> None:
    raw = torch.randn(1, 8, 2, 3, 3)
    latents = vae.normalise(raw)
    torch.testing.assert_close(latents[0, 5], (raw[0, 5] - vae.latent_mean[5]) / vae.latent_std[5])
    torch.testing.assert_close(vae.denormalise(latents), raw)


def test_latents_are_the_normalised_mean(vae: PlateVAE) -> None:
    frames = torch.randn(1, 3, 16, 16)
    mean, log_variance = vae.posterior(frames)
    assert log_variance.min() >= -12 and log_variance.max() <= 4
    torch.testing.assert_close(vae.encode(frames[:, :, None])[:, :, 0], vae.normalise(mean[:, :, None])[:, :, 0])
