"""The autoencoder of plate, tiny and with random weights."""

import pytest
import torch

from calotype.plate.training.between import begin_as_a_fade
from calotype.vae.base import VideoAutoencoder
from calotype.vae.plate import PlateClipVAE, PlateClipVAEConfig, PlateVAE, PlateVAEConfig


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


@pytest.fixture
def clip_vae() -> PlateClipVAE:
    torch.manual_seed(0)
    config = PlateClipVAEConfig(
        encoder_widths=(8, 8), decoder_widths=(8, 8, 8), decoder_blocks=(1, 1, 1), group=3, between_blocks=(1, 1)
    )
    return PlateClipVAE(config).requires_grad_(False)


def test_a_clip_keeps_one_frame_in_a_group_as_a_picture(clip_vae: PlateClipVAE) -> None:
    assert isinstance(clip_vae, VideoAutoencoder)
    assert clip_vae.temporal_downsampling == 3
    clip = torch.randn(2, 3, 7, 16, 24)
    latents = clip_vae.encode(clip)
    assert latents.shape == (2, 8, 3, 2, 3)
    for place, frame in enumerate((0, 3, 6)):
        picture = clip_vae.encode(clip[:, :, frame : frame + 1])
        torch.testing.assert_close(latents[:, :, place : place + 1], picture)
    with pytest.raises(ValueError, match="6 frames; it must have 1 more than a multiple of 3"):
        clip_vae.encode(clip[:, :, :6])


def test_a_group_is_drawn_from_its_latent_frame_and_the_one_before(clip_vae: PlateClipVAE) -> None:
    latents = torch.randn(1, 8, 4, 2, 3)
    whole = clip_vae.decode(latents)
    assert whole.shape == (1, 3, 10, 16, 24)
    groups = [*clip_vae.stream_decode(latents)]
    assert [group.shape[2] for group in groups] == [1, 3, 3, 3]
    assert torch.equal(torch.cat(groups, dim=2), whole)
    torch.testing.assert_close(whole[:, :, :1], PlateVAE.decode(clip_vae, latents[:, :, :1]))
    changed = latents.clone()
    changed[:, :, 3] += 1
    assert torch.equal(clip_vae.decode(changed)[:, :, :7], whole[:, :, :7])
    torch.testing.assert_close(clip_vae.decode(latents[:, :, 1:3])[:, :, 1:], whole[:, :, 4:7])


def test_between_begins_as_a_fade(clip_vae: PlateClipVAE) -> None:
    begin_as_a_fade(clip_vae.between)
    for mine, theirs in zip(clip_vae.between.tail, [*clip_vae.decoder][clip_vae.decoder.depth :], strict=True):
        mine.load_state_dict(theirs.state_dict())
    latents = torch.randn(1, 8, 2, 2, 3)
    last = clip_vae.decode(latents)[:, :, -1:]
    torch.testing.assert_close(last, PlateVAE.decode(clip_vae, latents[:, :, 1:]))
    before, after = (clip_vae.decoder.features(clip_vae.denormalise(latents)[:, :, n]) for n in (0, 1))
    third = clip_vae.decoder.pixels(before + (after - before) / 3)
    torch.testing.assert_close(clip_vae.decode(latents)[:, :, 1], third)
