"""LTX-Video's autoencoders against diffusers' on tiny random weights."""

import json

import pytest
import torch
from clip_vae import (
    check_calls_share_nothing,
    check_its_folder_is_that_of_diffusers,
    check_options_keep_the_result_close,
    check_same_weights,
    check_what_is_no_clip_is_refused,
    clip,
    drawn,
    streaming_peak,
)
from parity import error
from peak_memory import Alive
from safetensors.torch import load_file, save_file

from calotype.core.loading import build_on_meta
from calotype.core.shapes import Shapes
from calotype.vae.base import VideoAutoencoder
from calotype.vae.ltx import load_ltx_vae, load_ltx_vae_file
from calotype.vae.ltx_config import LTXVAEConfig, ltx_vae_config
from calotype.vae.ltx_keys import ltx_key_map
from calotype.vae.ltx_shapes import sized_ltx_vae_config
from calotype.vae.tiling import Tiling

from ..tiny_ltx_vae import KINDS, in_original_layout, ltx_vae_class, save_ltx_vae

TIME = 0.07


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """diffusers' model and its folder, by kind."""
    made = {}
    for kind, sizes in KINDS.items():
        folder = tmp_path_factory.mktemp("vae")
        made[kind] = save_ltx_vae(folder, sizes), folder
    return made


@pytest.fixture(scope="module", params=KINDS)
def both(request, folders):
    """Ours, theirs and the folder."""
    theirs, folder = folders[request.param]
    return load_ltx_vae(folder).at(TIME), theirs, folder


def by_diffusers(model, latents, time=TIME):
    """Pixels of normalised latents, with the noise that its layers draw from the global generator."""
    mean, std = (each.view(1, -1, 1, 1, 1) for each in (model.latents_mean, model.latents_std))
    torch.manual_seed(0)
    told = torch.full((len(latents),), time) if model.config.timestep_conditioning else None
    return model.decode(latents * std + mean, told, return_dict=False)[0]


@pytest.mark.parametrize("cells", [(2, 3), (1, 2)])
@pytest.mark.parametrize("groups", [0, 1, 2])
def test_latents_and_pixels_are_those_of_diffusers(both, groups, cells):
    ours, theirs, _ = both
    frames = 1 + groups * ours.temporal_downsampling
    pixels = clip(ours, frames, cells, rows=2)
    mean, std = (each.view(1, -1, 1, 1, 1) for each in (theirs.latents_mean, theirs.latents_std))
    posterior = theirs.encode(pixels).latent_dist
    noise = drawn(*posterior.mean.shape, seed=1)
    assert error(ours.encode(pixels), (posterior.mean - mean) / std) < 1e-5
    assert error(ours.encode(pixels, noise), (posterior.mean + posterior.std * noise - mean) / std) < 1e-5
    latents = drawn(*posterior.mean.shape, seed=2)
    expected = by_diffusers(theirs, latents)
    found = ours.decode(latents)
    assert found.shape == expected.shape == (2, 3, frames, *pixels.shape[3:])
    assert error(found, expected) < 1e-5


def test_a_longer_clip_than_pixels_see(both):
    """What is decoded frame by frame is the whole clip of diffusers, first and last frames and those between."""
    ours, theirs, _ = both
    latents = drawn(1, 4, 14, 1, 2)
    frames = list(ours.stream_decode(latents))
    expected = by_diffusers(theirs, latents)
    assert error(torch.cat(frames, dim=2), expected) < 1e-5
    changed = latents.clone()
    changed[:, :, -1] += 3
    far = by_diffusers(theirs, changed)
    assert not torch.equal(far[:, :, -1], expected[:, :, -1])


def test_causal_decoders(tmp_path):
    theirs = save_ltx_vae(tmp_path, KINDS["0.9.0"], decoder_causal=True, encoder_causal=False)
    ours, latents = load_ltx_vae(tmp_path), drawn(1, 4, 3, 2, 2)
    assert error(ours.decode(latents), by_diffusers(theirs, latents)) < 1e-5
    assert torch.equal(ours.decode(latents[:, :, :1]), next(ours.stream_decode(latents)))
    pixels = clip(ours, 5, (1, 2))
    mean, std = (each.view(1, -1, 1, 1, 1) for each in (theirs.latents_mean, theirs.latents_std))
    assert error(ours.encode(pixels), (theirs.encode(pixels).latent_dist.mean - mean) / std) < 1e-5


def test_frames_come_as_they_are_ready(folders):
    """A frame is there when the latents that it sees are, and the whole is their concatenation."""
    _, folder = folders["0.9.0"]
    ours, seen = load_ltx_vae(folder), []
    hook = ours.module.decoder.conv_in.conv.register_forward_hook(lambda *_: seen.append(1))
    latents = drawn(1, 4, 20, 1, 1)
    counts = []
    for _ in ours.stream_decode(latents):
        counts.append(len(seen))
    hook.remove()
    assert isinstance(ours, VideoAutoencoder)
    assert len(counts) == 1 + 19 * 4
    assert counts[0] < 16 and counts[-1] == 20 and sorted(counts) == counts
    assert torch.equal(torch.cat(list(ours.stream_decode(latents)), dim=2), ours.decode(latents))


def test_calls_share_nothing(both):
    check_calls_share_nothing(both[0], (2, 3), (1, 2))


def test_a_decoder_is_told_its_time(folders):
    theirs, folder = folders["0.9.5"]
    ours, latents = load_ltx_vae(folder), drawn(2, 4, 2, 1, 2)
    assert ours.is_told_time and not load_ltx_vae(folders["0.9.0"][1]).is_told_time
    for time in (0.0, 0.3, 1.0):
        assert error(ours.at(time).decode(latents), by_diffusers(theirs, latents, time)) < 1e-5
    assert ours.time == 0.0
    noise, (mean, std) = drawn(2, 4, 2, 1, 2, seed=4), (theirs.latents_mean, theirs.latents_std)
    mean, std = (each.view(1, -1, 1, 1, 1) for each in (mean, std))
    wanted = 0.8 * (latents * std + mean) + 0.2 * noise
    assert error(ours.noised(latents, noise, 0.2) * std + mean, wanted) < 1e-6


def test_options_keep_the_result_close(folders):
    _, folder = folders["0.9.5"]
    latents, tiling = drawn(2, 4, 2, 6, 4), Tiling(size=4, overlap=2)
    check_options_keep_the_result_close(load_ltx_vae, folder, latents, tiling, most=0.5)
    ours, in_tiles = load_ltx_vae(folder), load_ltx_vae(folder, tiling=tiling)
    pixels = clip(ours, 9, (6, 4))
    assert 1e-6 < error(in_tiles.encode(pixels), ours.encode(pixels)) < 0.5


def test_what_is_no_clip_is_refused(both):
    check_what_is_no_clip_is_refused(both[0])


def test_memory_does_not_grow_with_the_clip(both):
    """Of 30 latent frames as of 16, which are more than a frame sees; and far less than diffusers'."""
    ours, theirs, _ = both
    shorter, longest = (streaming_peak(ours, drawn(1, 4, frames, 2, 2)) for frames in (16, 30))
    assert longest <= 1.02 * shorter
    with Alive() as alive:
        by_diffusers(theirs, drawn(1, 4, 30, 2, 2))
    assert longest < 0.3 * alive.peak


def test_its_folder_is_that_of_diffusers(both):
    check_its_folder_is_that_of_diffusers(load_ltx_vae, both[2], ltx_vae_config)


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_lightricks_layout_load_as_well(folders, tmp_path, kind):
    """They show their sizes, but for the epsilon; statistics that nobody reads are left out."""
    _, folder = folders[kind]
    ours, weights = load_ltx_vae(folder), load_file(folder / "diffusion_pytorch_model.safetensors")
    original = in_original_layout(weights, kind)
    assert "vae.decoder.up_blocks.0.res_blocks.0.conv1.conv.weight" in original
    save_file(original, tmp_path / "within.safetensors")
    save_file({name.removeprefix("vae."): each for name, each in original.items()}, tmp_path / "vae.safetensors")
    for file in ("within.safetensors", "vae.safetensors"):
        check_same_weights(ours, load_ltx_vae_file(tmp_path / file, ours.config))
        config = load_ltx_vae_file(tmp_path / file).config
        usual = {"resnet_norm_eps": 1e-6}
        assert config == LTXVAEConfig(**{**vars(ours.config), **usual})


PUBLISHED = {
    "0.9.0": LTXVAEConfig(),
    "0.9.1": LTXVAEConfig(
        decoder_block_out_channels=(256, 512, 1024),
        decoder_layers_per_block=(5, 6, 7, 8),
        decoder_spatio_temporal_scaling=(True,) * 3,
        decoder_inject_noise=(False, True, True, True),
        upsample_residual=(True,) * 3,
        upsample_factor=(2,) * 3,
        timestep_conditioning=True,
    ),
    "0.9.5": LTXVAEConfig(
        block_out_channels=(128, 256, 512, 1024, 2048),
        down_block_types=("LTXVideo095DownBlock3D",) * 4,
        layers_per_block=(4, 6, 6, 2, 2),
        spatio_temporal_scaling=(True,) * 4,
        downsample_type=("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
        decoder_block_out_channels=(256, 512, 1024),
        decoder_layers_per_block=(5, 5, 5, 5),
        decoder_spatio_temporal_scaling=(True,) * 3,
        decoder_inject_noise=(False,) * 4,
        upsample_residual=(True,) * 3,
        upsample_factor=(2,) * 3,
        timestep_conditioning=True,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    ),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_files_are_told_apart(kind):
    """Their names, which diffusers' converter takes to its own, show the config."""
    from diffusers.loaders.single_file_utils import convert_ltx_vae_checkpoint_to_diffusers

    config = PUBLISHED[kind]
    module = build_on_meta(lambda: ltx_vae_class()(**config.entries()))
    names = {rule.target: rule.sources for rule in ltx_key_map(module, config).layouts[1].rules}
    weights = module.state_dict()
    original = {f"vae.{names[name]}": weight for name, weight in weights.items()}
    assert convert_ltx_vae_checkpoint_to_diffusers(dict(original)).keys() == weights.keys()
    shapes = Shapes({name: tuple(weight.shape) for name, weight in original.items()})
    assert sized_ltx_vae_config(shapes.within("vae.")) == config
    assert (config.pixels_per_cell, config.frames_per_cell) == (32, 8)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("0.9.0", {"_class_name": "AutoencoderKL"}, "_class_name is 'AutoencoderKL'"),
        ("0.9.0", {"scaling_factor": 0.5}, "scaling_factor is 0.5; only autoencoders where it is 1"),
        ("0.9.0", {"patch_size_t": 2}, "patch_size_t is 2; only"),
        (
            "0.9.0",
            {"decoder_spatio_temporal_scaling": [True] * 3},
            "the encoder's levels make .* 4 frames and 8 pixels",
        ),
        ("0.9.0", {"spatial_compression_ratio": 16}, "the compression ratios make .* 4 frames and 16 pixels"),
        ("0.9.0", {"timestep_conditioning": True}, "changes widths by its factors alone"),
        ("0.9.0", {"patch_size": "2"}, "patch_size is '2'; it must be a whole number over 0"),
        ("0.9.0", {"block_out_channels": [6, 8]}, "no AutoencoderKLLTXVideo can be made|does not fit"),
        ("0.9.0", {"decoder_inject_noise": [False]}, "no AutoencoderKLLTXVideo can be made"),
        ("0.9.5", {"downsample_type": ["odd"] * 4}, "a level is .* with downsample_type 'odd'"),
        ("0.9.5", {"attention": True}, "attention is True; known entries are"),
    ],
)
def test_configs_that_make_no_model_are_refused(folders, tmp_path, kind, changes, message):
    folder = folders[kind][1]
    entries = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**entries, **changes}))
    weights = "diffusion_pytorch_model.safetensors"
    (tmp_path / weights).symlink_to(folder / weights)
    with pytest.raises(ValueError, match=message):
        load_ltx_vae(tmp_path)
