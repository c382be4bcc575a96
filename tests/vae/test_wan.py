"""Wan's autoencoders against diffusers' on tiny random weights."""

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
from calotype.vae.tiling import Tiling, tiled
from calotype.vae.wan import load_wan_vae, load_wan_vae_file
from calotype.vae.wan_config import WAN_2_1, WAN_2_2, read_wan_vae_config, sized_wan_vae_config, wan_vae_config

from ..original_layouts import wan_name
from ..tiny_wan_vae import WAN_2_1 as TINY_2_1
from ..tiny_wan_vae import WAN_2_2 as TINY_2_2
from ..tiny_wan_vae import save_wan_vae, wan_vae_class

SIZES = {"2.1": TINY_2_1, "2.2": TINY_2_2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """diffusers' model and its folder, by kind."""
    made = {}
    for kind, sizes in SIZES.items():
        folder = tmp_path_factory.mktemp("vae")
        made[kind] = save_wan_vae(folder, sizes), folder
    return made


@pytest.fixture(scope="module", params=SIZES)
def both(request, folders):
    """Ours, theirs and the folder."""
    theirs, folder = folders[request.param]
    return load_wan_vae(folder), theirs, folder


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def statistics(model):
    return (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (model.config.latents_mean, model.config.latents_std))


def clip(ours, frames, cells, rows=1, seed=0):
    sides = (cells[0] * ours.downsampling, cells[1] * ours.downsampling)
    return drawn(rows, 3, frames, *sides, seed=seed).clamp(-1, 1)


@pytest.mark.parametrize("cells", [(3, 4), (2, 3)])
@pytest.mark.parametrize("frames", [1, 5, 9, 17])
def test_latents_and_pixels_are_those_of_diffusers(both, frames, cells):
    ours, theirs, _ = both
    pixels, (mean, std) = clip(ours, frames, cells, rows=2), statistics(theirs)
    posterior = theirs.encode(pixels).latent_dist
    noise = drawn(*posterior.mean.shape, seed=1)
    assert error(ours.encode(pixels), (posterior.mean - mean) / std) < 1e-5
    assert error(ours.encode(pixels, noise), (posterior.mean + posterior.std * noise - mean) / std) < 1e-5
    latents = drawn(*posterior.mean.shape, seed=2)
    expected = theirs.decode(latents / (1.0 / std) + mean).sample
    found = ours.decode(latents)
    assert found.shape == expected.shape == (2, 3, frames, *pixels.shape[3:])
    assert (found.clamp(-1, 1) - expected).abs().max() < 1e-5


def test_frames_come_as_they_are_ready(both):
    ours, _, _ = both
    assert isinstance(ours, VideoAutoencoder)
    latents = drawn(2, 4, 4, 3, 2)
    calls = []
    hook = ours.module.decoder.register_forward_hook(lambda *_: calls.append(1))
    groups = []
    for group in ours.stream_decode(latents):
        groups.append(group)
        assert len(calls) == len(groups)
    hook.remove()
    assert [group.shape[2] for group in groups] == [1] + 3 * [ours.temporal_downsampling]
    assert torch.equal(torch.cat(groups, dim=2), ours.decode(latents))


def test_later_frames_change_nothing_before_them(both):
    ours, _, _ = both
    latents = drawn(1, 4, 3, 3, 2)
    assert torch.equal(next(ours.stream_decode(latents)), ours.decode(latents[:, :, :1]))
    pixels = clip(ours, 9, (3, 2))
    assert torch.equal(ours.encode(pixels)[:, :, :2], ours.encode(pixels[:, :, : 1 + ours.temporal_downsampling]))


def test_calls_share_no_caches(both):
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
    """Rows one by one are the same; tiles see less."""
    ours, _, folder = both
    latents = drawn(2, 4, 2, 9, 6)
    whole = ours.decode(latents)
    sliced = load_wan_vae(folder, slicing=True)
    assert error(sliced.decode(latents), whole) < 2e-6
    in_tiles = load_wan_vae(folder, tiling=Tiling(size=6, overlap=3), slicing=True)
    assert 1e-6 < error(in_tiles.decode(latents), whole) < 0.3
    assert torch.equal(torch.cat(list(in_tiles.stream_decode(latents)), dim=2), in_tiles.decode(latents))
    assert torch.equal(in_tiles.decode(latents[..., :6, :6]), sliced.decode(latents[..., :6, :6]))
    pixels = clip(ours, 1 + ours.temporal_downsampling, (9, 6), rows=2)
    assert 1e-6 < error(in_tiles.encode(pixels), ours.encode(pixels)) < 0.3
    half = moved(ours, torch.device("cpu"), torch.bfloat16)
    assert error(half.decode(latents[:, :, :1, :3, :3]), ours.decode(latents[:, :, :1, :3, :3])) < 0.1


def test_tiles_are_clips_of_their_own_that_are_blended(both):
    """Frame by frame over all tiles gives what each tile's clip alone gives: test_tiling.py holds for clips too."""
    ours, _, folder = both
    tiling, latents = Tiling(size=4, overlap=2), drawn(1, 4, 3, 7, 5)
    streamed = load_wan_vae(folder, tiling=tiling).decode(latents)
    blended = tiled(ours.decode, latents, tiling, unit_in=1, unit_out=ours.downsampling)
    assert error(streamed, blended) < 1e-6


def test_what_is_no_clip_is_refused(both):
    ours, _, _ = both
    unit, group = ours.downsampling, ours.temporal_downsampling
    with pytest.raises(ValueError, match=f"the width is {unit + 1} pixels; it must be a multiple of {unit}, such as"):
        ours.encode(drawn(1, 3, 1, unit, unit + 1))
    with pytest.raises(ValueError, match=rf"has {group} frames; .* of {group}, such as 1 or {group + 1}"):
        ours.encode(drawn(1, 3, group, unit, unit))
    with pytest.raises(ValueError, match=r"shape \[1, 5, 1, 2, 2\]; it must be \[rows, 4, frames"):
        ours.stream_decode(drawn(1, 5, 1, 2, 2))
    with pytest.raises(ValueError, match=r"latents are torch\.int64"):
        ours.decode(torch.ones(1, 4, 1, 2, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="noise has shape"):
        ours.encode(drawn(1, 3, 1, unit, unit), drawn(1, 4, 2, 1, 1))


def test_memory_does_not_grow_with_the_clip(folders):
    """33 frames as 9: all that is alive at once after any operation, beside the latents; and less than diffusers'."""
    theirs, folder = folders["2.1"]
    ours = load_wan_vae(folder)

    def peak(frames):
        latents = drawn(1, 4, frames, 6, 6)
        with Alive() as alive:
            for _ in ours.stream_decode(latents):
                pass
        return alive.peak - latents.nbytes

    assert peak(9) <= 1.01 * peak(3)
    assert peak(3) > 1.2 * peak(1)
    with Alive() as alive:
        theirs.decode(drawn(1, 4, 9, 6, 6))
    assert peak(9) < 0.9 * alive.peak


def test_its_folder_is_that_of_diffusers(both):
    ours, _, folder = both
    component, weights = ours.component(), load_file(folder / "diffusion_pytorch_model.safetensors")
    assert wan_vae_config(component.entries) == ours.config == read_wan_vae_config(folder)
    assert set(component.weights) == set(weights)
    assert all(torch.equal(component.weights[name].read(), each) for name, each in weights.items())
    with pytest.raises(ValueError, match="its tiling is"):
        load_wan_vae(folder, tiling=Tiling()).component()


def nested_name(name):
    """A name of diffusers' as Wan 2.2 has it, for one resnet a level of the encoder and two of the decoder."""
    for side, way, last in (("encoder", "down", "1"), ("decoder", "up", "2")):
        if name.startswith(f"{side}.{way}_blocks"):
            _, _, level, kind, *rest = name.split(".")
            place, inner = (last, rest) if kind == f"{way}sampler" else (rest[0], rest[1:])
            plain = wan_name(".".join(("encoder.mid_block.resnets.0", *inner))).removeprefix("encoder.middle.0.")
            return ".".join((side, f"{way}samples", level, f"{way}samples", place, plain))
    return wan_name(name)


@pytest.mark.parametrize(("kind", "named"), [("2.1", wan_name), ("2.2", nested_name)])
def test_files_of_wans_layout_load_as_well(folders, tmp_path, kind, named):
    _, folder = folders[kind]
    ours, config = load_wan_vae(folder), read_wan_vae_config(folder)
    weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    names = {name: named(name) for name in weights}
    if kind == "2.2":
        assert names["decoder.up_blocks.0.upsampler.time_conv.bias"] == "decoder.upsamples.0.upsamples.2.time_conv.bias"
        assert names["encoder.down_blocks.1.resnets.0.norm1.gamma"] == (
            "encoder.downsamples.1.downsamples.0.residual.0.gamma"
        )
    save_file({names[name]: tensor for name, tensor in weights.items()}, tmp_path / "wan_vae.safetensors")
    save_file({f"vae.{names[name]}": tensor for name, tensor in weights.items()}, tmp_path / "within.safetensors")
    for file in ("wan_vae.safetensors", "within.safetensors"):
        other = load_wan_vae_file(tmp_path / file, config)
        for name, each in ours.module.state_dict().items():
            assert torch.equal(other.module.state_dict()[name], each)


@pytest.mark.parametrize(("kind", "named"), [("2.1", wan_name), ("2.2", nested_name)])
def test_a_file_shows_its_sizes(kind, named):
    usual = {"2.1": WAN_2_1, "2.2": WAN_2_2}[kind]
    own = {"latents_mean": usual.latents_mean, "latents_std": usual.latents_std, "z_dim": usual.z_dim}
    with torch.device("meta"):
        module = wan_vae_class()(**{**SIZES[kind], **own})
    config = wan_vae_config(json.loads(module.to_json_string()))
    weights = {name: tuple(each.shape) for name, each in module.state_dict().items()}
    for layout in (named, str):
        assert sized_wan_vae_config(Shapes({layout(name): shape for name, shape in weights.items()})) == config


@pytest.mark.parametrize("config", [WAN_2_1, WAN_2_2], ids=["2.1", "2.2"])
def test_published_sizes_are_told_apart(config):
    with torch.device("meta"):
        weights = wan_vae_class()(**config.entries()).state_dict()
    assert sized_wan_vae_config(Shapes({name: tuple(each.shape) for name, each in weights.items()})) == config


def test_published_files_say_what_ours_say():
    """Wan 2.2's config.json has an entry that diffusers does not read; Wan 2.1's says the defaults."""
    entries = {**WAN_2_2.entries(), "_class_name": "AutoencoderKLWan", "attn_scales": [], "dropout": 0.0}
    assert wan_vae_config({**entries, "clip_output": False}) == WAN_2_2
    assert wan_vae_config({"_class_name": "AutoencoderKLWan"}) == WAN_2_1
    assert (len(WAN_2_2.latents_mean), WAN_2_2.scale_factor_spatial, WAN_2_2.scale_factor_temporal) == (48, 16, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "AutoencoderKL"}, "_class_name is 'AutoencoderKL'"),
        ({"temperal_downsample": [True]}, "temperal_downsample has 1 entries for 3 of dim_mult"),
        ({"z_dim": 5}, "latents_mean has 4 values"),
        ({"latents_std": [1.0, 0.0, 1.0, 1.0]}, "all must be over 0"),
        ({"base_dim": "6"}, "base_dim is '6'; it must be a whole number over 0"),
        ({"patch_size": 2}, "in_channels is 3; it must be 12 by the levels and patch_size"),
        ({"scale_factor_temporal": 8}, "scale_factor_temporal is 8; it must be 4"),
        ({"scale_factor_spatial": 8}, "scale_factor_spatial is 8; it must be 4"),
        ({"attn_scales": [0.5]}, r"attn_scales is \[0.5\]; known entries are"),
        ({"use_quant_conv": True}, "use_quant_conv is True; known entries are"),
    ],
)
def test_configs_that_make_no_model_are_refused(folders, tmp_path, changes, message):
    entries = json.loads((folders["2.1"][1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**entries, **changes}))
    with pytest.raises(ValueError, match=message):
        load_wan_vae(tmp_path)
