"""HunyuanVideo 1.5's autoencoder against diffusers' on tiny random weights."""

import json
import threading

import pytest
import torch
from parity import error
from peak_memory import Alive
from safetensors.torch import load_file, save_file

from calotype.core.copies import moved
from calotype.core.shapes import Shapes
from calotype.vae.base import VideoAutoencoder
from calotype.vae.hunyuan_video import load_hunyuan_video_vae, load_hunyuan_video_vae_file
from calotype.vae.hunyuan_video_config import (
    HunyuanVideoVAEConfig,
    hunyuan_video_vae_config,
    read_hunyuan_video_vae_config,
    sized_hunyuan_video_vae_config,
)
from calotype.vae.tiling import Tiling, tiled

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


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def clip(frames, cells, rows=1, seed=0):
    return drawn(rows, 3, frames, 4 * cells[0], 4 * cells[1], seed=seed).clamp(-1, 1)


@pytest.mark.parametrize("cells", [(3, 4), (2, 3)])
@pytest.mark.parametrize("frames", [1, 5, 9, 17])
def test_latents_and_pixels_are_those_of_diffusers(both, frames, cells):
    ours, theirs, _ = both
    pixels = clip(frames, cells, rows=2)
    posterior, factor = theirs.encode(pixels).latent_dist, theirs.config.scaling_factor
    noise = drawn(*posterior.mean.shape, seed=1)
    assert error(ours.encode(pixels), posterior.mean * factor) < 1e-5
    assert error(ours.encode(pixels, noise), (posterior.mean + posterior.std * noise) * factor) < 1e-5
    latents = drawn(*posterior.mean.shape, seed=2)
    expected, found = theirs.decode(latents / factor).sample, ours.decode(latents)
    assert found.shape == expected.shape == (2, 3, frames, *pixels.shape[3:])
    assert error(found, expected) < 1e-5


def test_frames_come_as_they_are_ready(both):
    ours, _, _ = both
    assert isinstance(ours, VideoAutoencoder)
    latents = drawn(2, 4, 4, 3, 2)
    calls = []
    hook = ours.module.decoder.conv_out.conv.register_forward_hook(lambda *_: calls.append(1))
    groups = []
    for group in ours.stream_decode(latents):
        groups.append(group)
        assert len(calls) == len(groups)
    hook.remove()
    assert [group.shape[2] for group in groups] == [1] + 3 * [ours.temporal_downsampling]
    assert torch.equal(torch.cat(groups, dim=2), ours.decode(latents))
    stretched = list(ours.stream_stretches(iter(latents.split(2, dim=2))))
    assert torch.equal(torch.cat(stretched, dim=2), ours.decode(latents))


def test_later_frames_change_nothing_before_them(both):
    ours, _, _ = both
    latents = drawn(1, 4, 3, 3, 2)
    assert torch.equal(next(ours.stream_decode(latents)), ours.decode(latents[:, :, :1]))
    pixels = clip(9, (3, 2))
    assert torch.equal(ours.encode(pixels)[:, :, :2], ours.encode(pixels[:, :, : 1 + ours.temporal_downsampling]))


def test_calls_share_nothing(both):
    """Two streams taken in turn, an abandoned one, and threads: each is as if it were alone."""
    ours, _, _ = both
    latents = [drawn(1, 4, frames, 3, 2, seed=frames) for frames in (3, 5)]
    expected = [ours.decode(each) for each in latents]
    next(ours.stream_decode(latents[1]))
    first, second = (ours.stream_decode(each) for each in latents)
    groups = [(next(first), next(second)) for _ in range(3)]
    assert torch.equal(torch.cat([a for a, _ in groups], dim=2), expected[0])
    assert torch.equal(torch.cat([*(b for _, b in groups), *second], dim=2), expected[1])
    found = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: ours.decode(latents[i])})) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], expected[i]) for i in (0, 1))


def test_options_keep_the_result_close(both):
    """Rows one by one are the same; tiles see less, each as a clip of its own."""
    ours, _, folder = both
    latents = drawn(2, 4, 2, 9, 6)
    whole = ours.decode(latents)
    sliced = load_hunyuan_video_vae(folder, slicing=True)
    assert error(sliced.decode(latents), whole) < 2e-6
    tiling = Tiling(size=6, overlap=3)
    in_tiles = load_hunyuan_video_vae(folder, tiling=tiling)
    assert 1e-6 < error(in_tiles.decode(latents), whole) < 0.5
    blended = tiled(ours.decode, latents, tiling, unit_in=1, unit_out=ours.downsampling)
    assert error(in_tiles.decode(latents), blended) < 1e-6
    half = moved(ours, torch.device("cpu"), torch.bfloat16)
    assert error(half.decode(latents[:, :, :1, :3, :3]), ours.decode(latents[:, :, :1, :3, :3])) < 0.1


def test_memory_does_not_grow_with_the_clip(folders):
    """All that is alive at once after any operation, beside the latents, grows by what attention reads; diffusers' by
    the clip."""
    theirs, folder = folders["4"]
    ours = load_hunyuan_video_vae(folder)

    def peak(run, frames):
        latents = drawn(1, 4, frames, 6, 6)
        with Alive() as alive:
            run(latents)
        return alive.peak - latents.nbytes

    def streamed(latents):
        for _ in ours.stream_decode(latents):
            pass

    states = 4 * 16 * 6 * 6  # bytes of a latent frame's, which are held twice while one is added
    assert peak(streamed, 9) <= 1.01 * peak(streamed, 3) + 2 * 6 * states
    assert peak(streamed, 9) <= 1.1 * peak(streamed, 3)
    assert peak(streamed, 9) < 0.5 * peak(lambda latents: theirs.decode(latents), 9)


def test_what_is_no_clip_is_refused(both):
    ours, _, _ = both
    group = ours.temporal_downsampling
    with pytest.raises(ValueError, match="the width is 5 pixels; it must be a multiple of 4, such as"):
        ours.encode(drawn(1, 3, 1, 4, 5))
    with pytest.raises(ValueError, match=rf"has {group} frames; .* of {group}, such as 1 or {group + 1}"):
        ours.encode(drawn(1, 3, group, 4, 4))
    with pytest.raises(ValueError, match=r"shape \[1, 5, 1, 2, 2\]; it must be \[rows, 4, frames"):
        ours.stream_decode(drawn(1, 5, 1, 2, 2))
    with pytest.raises(ValueError, match=r"latents are torch\.int64"):
        ours.decode(torch.ones(1, 4, 1, 2, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="noise has shape"):
        ours.encode(drawn(1, 3, 1, 4, 4), drawn(1, 4, 2, 1, 1))


def test_its_folder_is_that_of_diffusers(both):
    ours, _, folder = both
    component, weights = ours.component(), load_file(folder / "diffusion_pytorch_model.safetensors")
    assert hunyuan_video_vae_config(component.entries) == ours.config == read_hunyuan_video_vae_config(folder)
    assert set(component.weights) == set(weights)
    assert all(torch.equal(component.weights[name].read(), each) for name, each in weights.items())
    with pytest.raises(ValueError, match="its tiling is"):
        load_hunyuan_video_vae(folder, tiling=Tiling()).component()


def test_files_of_tencents_layout_load_as_well(folders, tmp_path):
    _, folder = folders["4"]
    ours, config = load_hunyuan_video_vae(folder), read_hunyuan_video_vae_config(folder)
    weights = vae_in_original_layout(load_file(folder / "diffusion_pytorch_model.safetensors"))
    assert "encoder.down.1.downsample.conv.conv.weight" in weights and "decoder.mid.attn_1.q.weight" in weights
    save_file(weights, tmp_path / "vae.safetensors")
    save_file({f"vae.{name}": each for name, each in weights.items()}, tmp_path / "within.safetensors")
    for file in ("vae.safetensors", "within.safetensors"):
        other = load_hunyuan_video_vae_file(tmp_path / file, config)
        for name, each in ours.module.state_dict().items():
            assert torch.equal(other.module.state_dict()[name], each)


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
