"""The autoencoder of plate, tiny and with random weights."""

import pytest
import torch

from calotype.vae.base import VideoAutoencoder
from calotype.vae.between import FLOW_UNIT, NEARER
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
        encoder_widths=(8, 8),
        decoder_widths=(8, 8, 8),
        decoder_blocks=(1, 1, 1),
        group=3,
        between_blocks=1,
        between_width=8,
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


def test_between_begins_as_a_cut_and_what_is_kept_is_drawn_as_a_picture(clip_vae: PlateClipVAE) -> None:
    latents = torch.randn(1, 8, 2, 2, 3)
    clip = clip_vae.decode(latents)
    first, last = (PlateVAE.decode(clip_vae, latents[:, :, n : n + 1])[:, :, 0] for n in (0, 1))
    torch.testing.assert_close(clip[:, :, 0], first)
    torch.testing.assert_close(clip[:, :, -1], last)
    share = torch.tensor(NEARER).neg().sigmoid()
    torch.testing.assert_close(clip[:, :, 1], first + share * (last - first))
    torch.testing.assert_close(clip[:, :, 2], last + share * (first - last))


def test_between_looks_where_it_says(clip_vae: PlateClipVAE) -> None:
    """Flows of whole pixels move the frames by these, the edges of the frame stay beyond it, and shares mix."""
    between, frames = clip_vae.between, (torch.randn(1, 3, 16, 24), torch.randn(1, 3, 16, 24))
    with torch.no_grad():
        bias = torch.zeros(2, 5, 2, 2)  # frames, heads, and the four flows of a cell
        bias[0, 0], bias[0, 4] = -4 / FLOW_UNIT, -100  # the first frame: 4 pixels to the left in the one before
        bias[1, 3], bias[1, 4] = 2 / FLOW_UNIT, 100  # the second one: 2 pixels down in the one after
        between.warps.bias.copy_(bias.flatten())
    features = tuple(torch.randn(1, 8, 2, 3) for _ in range(2))
    drawn, warps = between.drawn((features[0], features[1]), frames)
    assert warps.before.shape == (1, 2, 2, 4, 6) and warps.share.shape == (1, 2, 1, 4, 6)
    torch.testing.assert_close(drawn[0, :, 0, :, 4:], frames[0][0, :, :, :-4], atol=1e-4, rtol=0)
    torch.testing.assert_close(drawn[0, :, 0, :, 1], frames[0][0, :, :, 0], atol=1e-4, rtol=0)
    torch.testing.assert_close(drawn[0, :, 1, :-2], frames[1][0, :, 2:], atol=1e-4, rtol=0)
    half = between.bfloat16().drawn(
        (features[0].bfloat16(), features[1].bfloat16()), (frames[0].bfloat16(), frames[1].bfloat16())
    )[0]
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), drawn, atol=0.1, rtol=0)
