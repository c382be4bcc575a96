"""HunyuanVideo 1.5's autoencoder against diffusers' on tiny random weights."""

import json

import pytest
import torch
from clip_vae import (
    check_calls_share_nothing,
    check_groups_come_as_they_are_ready,
    check_its_folder_is_that_of_diffusers,
    check_later_frames_change_nothing_before_them,
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

from calotype.core.shapes import Shapes
from calotype.vae.hunyuan_video import load_hunyuan_video_vae, load_hunyuan_video_vae_file
from calotype.vae.hunyuan_video_config import (
    HunyuanVideoVAEConfig,
    hunyuan_video_vae_config,
    read_hunyuan_video_vae_config,
    sized_hunyuan_video_vae_config,
)
from calotype.vae.tiling import Tiling

from ..tiny_hunyuan_video import OTHER_VAE, VAE, hunyuan_video_vae, vae_in_original_layout

SIZES = {"4": VAE, "2": OTHER_VAE}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """diffusers' model and its folder, by the frames of a group."""
    made = {}
    for kind, sizes in SIZES.items():
        theirs, folder = hunyuan_video_vae(sizes), tmp_path_factory.mktemp("vae")
        theirs.save_pretrained(folder)
        made[kind] = theirs, folder
    return made


@pytest.fixture(scope="module", params=SIZES)
def both(request, folders):
    """Ours, theirs and the folder."""
    theirs, folder = folders[request.param]
    return load_hunyuan_video_vae(folder), theirs, folder


@pytest.mark.parametrize("cells", [(3, 4), (2, 3)])
@pytest.mark.parametrize("frames", [1, 5, 9, 17])
def test_latents_and_pixels_are_those_of_diffusers(both, frames, cells):
    ours, theirs, _ = both
    pixels = clip(ours, frames, cells, rows=2)
    posterior, factor = theirs.encode(pixels).latent_dist, theirs.config.scaling_factor
    noise = drawn(*posterior.mean.shape, seed=1)
    assert error(ours.encode(pixels), posterior.mean * factor) < 1e-5
    assert error(ours.encode(pixels, noise), (posterior.mean + posterior.std * noise) * factor) < 1e-5
    latents = drawn(*posterior.mean.shape, seed=2)
    expected, found = theirs.decode(latents / factor).sample, ours.decode(latents)
    assert found.shape == expected.shape == (2, 3, frames, *pixels.shape[3:])
    assert error(found, expected) < 1e-5


def test_frames_come_as_they_are_ready(both):
    check_groups_come_as_they_are_ready(both[0], both[0].module.decoder.conv_out.conv)


def test_later_frames_change_nothing_before_them(both):
    check_later_frames_change_nothing_before_them(both[0])


def test_calls_share_nothing(both):
    check_calls_share_nothing(both[0], (3, 5), (3, 2))


def test_options_keep_the_result_close(both):
    latents, tiling = drawn(2, 4, 2, 9, 6), Tiling(size=6, overlap=3)
    check_options_keep_the_result_close(load_hunyuan_video_vae, both[2], latents, tiling, most=0.5)


def test_memory_does_not_grow_with_the_clip(folders):
    """All that is alive at once after any operation, beside the latents, grows by what attention reads; diffusers' by
    the clip."""
    theirs, folder = folders["4"]
    ours, latents = load_hunyuan_video_vae(folder), drawn(1, 4, 9, 6, 6)
    short, long = streaming_peak(ours, latents[:, :, :3].clone()), streaming_peak(ours, latents)
    with Alive() as alive:
        theirs.decode(latents)
    states = 4 * 16 * 6 * 6  # bytes of a latent frame's, which are held twice while one is added
    assert long <= 1.01 * short + 2 * 6 * states
    assert long <= 1.1 * short
    assert long < 0.5 * (alive.peak - latents.nbytes)


def test_what_is_no_clip_is_refused(both):
    check_what_is_no_clip_is_refused(both[0])


def test_its_folder_is_that_of_diffusers(both):
    check_its_folder_is_that_of_diffusers(load_hunyuan_video_vae, both[2], hunyuan_video_vae_config)


def test_files_of_tencents_layout_load_as_well(folders, tmp_path):
    _, folder = folders["4"]
    ours, config = load_hunyuan_video_vae(folder), read_hunyuan_video_vae_config(folder)
    weights = vae_in_original_layout(load_file(folder / "diffusion_pytorch_model.safetensors"))
    assert "encoder.down.1.downsample.conv.conv.weight" in weights and "decoder.mid.attn_1.q.weight" in weights
    save_file(weights, tmp_path / "vae.safetensors")
    save_file({f"vae.{name}": each for name, each in weights.items()}, tmp_path / "within.safetensors")
    for file in ("vae.safetensors", "within.safetensors"):
        check_same_weights(ours, load_hunyuan_video_vae_file(tmp_path / file, config))


@pytest.mark.parametrize("sizes", [{**VAE, "scaling_factor": 1.03682}, HunyuanVideoVAEConfig().entries()])
def test_a_file_shows_its_sizes(sizes):
    from diffusers import AutoencoderKLHunyuanVideo15

    with torch.device("meta"):
        module = AutoencoderKLHunyuanVideo15(**sizes)
    config = hunyuan_video_vae_config(json.loads(module.to_json_string()))
    for weights in (module.state_dict(), vae_in_original_layout(module.state_dict())):
        assert sized_hunyuan_video_vae_config(Shapes({name: tuple(x.shape) for name, x in weights.items()})) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "AutoencoderKL"}, "_class_name is 'AutoencoderKL'"),
        ({"in_channels": 4}, "in_channels is 4; clips have 3"),
        ({"spatial_compression_ratio": 6}, "must be powers of 2"),
        ({"temporal_compression_ratio": 8}, "the second no larger than the first"),
        ({"block_out_channels": [8]}, "no AutoencoderKLHunyuanVideo15 can be made"),
        ({"scaling_factor": 0}, "scaling_factor is 0; it must be a number over 0"),
        ({"use_quant_conv": True}, "use_quant_conv is True; known entries are"),
    ],
)
def test_configs_that_make_no_model_are_refused(folders, tmp_path, changes, message):
    entries = json.loads((folders["4"][1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**entries, **changes}))
    (tmp_path / "diffusion_pytorch_model.safetensors").touch()
    with pytest.raises(ValueError, match=message):
        load_hunyuan_video_vae(tmp_path)
