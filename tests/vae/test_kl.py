"""The autoencoder of SD, SDXL, SD3 and FLUX.1 against diffusers' own, on tiny random checkpoints."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_kl import KINDS, WEIGHTS, copied, edit_config, reference, save
from torch import Tensor

from calotype.core.copies import moved
from calotype.vae.kl import KLAutoencoder, load_kl
from calotype.vae.tiling import Tiling


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each kind, as diffusers saves it; every weight matters."""
    return {name: save(tmp_path_factory.mktemp(name), kind) for name, kind in KINDS.items()}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, folders: dict[str, Path]) -> tuple[Any, KLAutoencoder]:
    """diffusers' autoencoder, and ours of the same folder."""
    return reference(folders[request.param]), load_kl(folders[request.param])


@pytest.fixture(scope="module")
def vae(folders: dict[str, Path]) -> KLAutoencoder:
    """One of ours."""
    return load_kl(folders["quantised"])


def pictures(height: int, width: int, rows: int = 2) -> Tensor:
    return torch.rand(rows, 3, 1, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1


def latents_of(vae: KLAutoencoder, height: int, width: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, vae.latent_channels, 1, height, width, generator=torch.Generator().manual_seed(2))


def smooth_latents(vae: KLAutoencoder, height: int, width: int) -> Tensor:
    down, across = torch.linspace(0, 2, height)[:, None], torch.linspace(-1, 3, width)[None]
    channels = [torch.sin(down * (1 + c / 4) + c) + torch.cos(across + c) for c in range(vae.latent_channels)]
    return torch.stack(channels)[None, :, None]


def worst(ours: Tensor, theirs: Tensor) -> float:
    """The largest relative error of a row."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).flatten(1).norm(dim=1) / theirs.flatten(1).norm(dim=1)).max().item()


def normalise(config: Any, raw: Tensor) -> Tensor:
    """As the pipelines of diffusers do."""
    if config.latents_mean is None:
        return (raw - (config.shift_factor or 0.0)) * config.scaling_factor
    mean, std = (torch.tensor(each).view(1, -1, 1, 1) for each in (config.latents_mean, config.latents_std))
    return (raw - mean) * config.scaling_factor / std


def denormalise(config: Any, latents: Tensor) -> Tensor:
    if config.latents_mean is None:
        return latents / config.scaling_factor + (config.shift_factor or 0.0)
    mean, std = (torch.tensor(each).view(1, -1, 1, 1) for each in (config.latents_mean, config.latents_std))
    return latents * std / config.scaling_factor + mean


@pytest.mark.parametrize(("height", "width"), [(24, 24), (16, 36)])
def test_parity(pair: tuple[Any, KLAutoencoder], height: int, width: int) -> None:
    theirs, ours = pair
    pixels = pictures(height, width)
    posterior = theirs.encode(pixels[:, :, 0]).latent_dist
    mean = ours.encode(pixels)
    assert mean.shape == (2, ours.latent_channels, 1, height // ours.downsampling, width // ours.downsampling)
    assert worst(mean[:, :, 0], normalise(theirs.config, posterior.mode())) <= 1e-5
    noise = latents_of(ours, *mean.shape[-2:])
    sample = posterior.sample(torch.Generator().manual_seed(2))
    assert worst(ours.encode(pixels, noise)[:, :, 0], normalise(theirs.config, sample)) <= 1e-5
    decoded = theirs.decode(denormalise(theirs.config, noise[:, :, 0])).sample
    assert worst(ours.decode(noise)[:, :, 0], decoded) <= 1e-5


def test_the_posterior_is_clamped_as_in_diffusers(folders: dict[str, Path], tmp_path: Path) -> None:
    weights = load_file(folders["quantised"] / WEIGHTS)
    weights["quant_conv.bias"][4:] = torch.tensor([50.0, -80.0, 0.0, 0.0])
    save_file(weights, copied(folders["quantised"], tmp_path) / WEIGHTS)
    _, std = load_kl(tmp_path).posterior(pictures(16, 16))
    theirs = reference(tmp_path).encode(pictures(16, 16)[:, :, 0]).latent_dist.std * 0.7
    torch.testing.assert_close(std[:, :, 0], theirs)
    assert std[:, 0].min() == std[:, 0].max() and std[:, 1].min() == std[:, 1].max()


def test_rows_are_independent_and_slicing_changes_nothing(vae: KLAutoencoder) -> None:
    sliced = dataclasses.replace(vae, slicing=True)
    pixels, latents = pictures(16, 24, rows=3), latents_of(vae, 8, 12, rows=3)
    for call, x in ((vae.encode, pixels), (vae.decode, latents)):
        alone = torch.cat([call(row) for row in x.split(1)])
        assert worst(call(x), alone) <= 1e-5
        assert worst(call(x.flip(0)).flip(0), alone) <= 1e-5
    assert worst(sliced.encode(pixels), vae.encode(pixels)) <= 1e-5
    assert worst(sliced.decode(latents), vae.decode(latents)) <= 1e-5
    assert torch.equal(sliced.decode(latents)[1:2], vae.decode(latents[1:2]))


def test_a_tile_that_holds_the_picture_is_no_tiling(vae: KLAutoencoder) -> None:
    pixels, latents = pictures(16, 24), latents_of(vae, 8, 12)
    for size in (12, 40):
        tiled = dataclasses.replace(vae, tiling=Tiling(size=size, overlap=3))
        assert torch.equal(tiled.encode(pixels), vae.encode(pixels))
        assert torch.equal(tiled.decode(latents), vae.decode(latents))


def test_larger_tiles_are_nearer_to_the_whole(vae: KLAutoencoder) -> None:
    latents = smooth_latents(vae, 20, 44)
    whole = vae.decode(latents)
    again = vae.encode(whole)
    decoded, encoded = list[float](), list[float]()
    for size in (12, 18, 32):
        tiled = dataclasses.replace(vae, tiling=Tiling(size=size, overlap=4), slicing=True)
        decoded.append(worst(tiled.decode(latents), whole))
        encoded.append(worst(tiled.encode(whole), again))
    for errors in (decoded, encoded):
        assert 0.2 > errors[0] > errors[1] > errors[2] > 1e-3, "the last has two tiles, or one if it were not tiled"
        assert errors[2] < 0.08


def test_borders_of_tiles_are_not_seen(folders: dict[str, Path]) -> None:
    vae = load_kl(folders["quantised"])
    make_smooth(vae)
    latents = smooth_latents(vae, 24, 44)
    for tiling in (Tiling(size=16, overlap=4), Tiling(size=24, overlap=6)):
        across, elsewhere = jumps(vae, latents, tiling)
        assert across <= 1.5 * elsewhere
        assert jumps(vae, latents, Tiling(size=22, overlap=0))[0] > 2.5 * elsewhere, "without an overlap they are"


def make_smooth(vae: KLAutoencoder) -> None:
    """A decoder whose pictures of smooth latents are smooth: its convolutions blur."""
    kernel = torch.tensor([1.0, 2.0, 1.0]) / 4
    for weight in vae.module.parameters():
        if weight.ndim == 4 and weight.shape[-1] == 3:
            weight.copy_(3 * weight.mean((2, 3), keepdim=True) * kernel[:, None] * kernel)


def jumps(vae: KLAutoencoder, latents: Tensor, tiling: Tiling) -> tuple[float, float]:
    """The largest difference of neighbouring columns across a tile's border, and elsewhere inside the picture."""
    margin, unit = 4 * vae.downsampling, vae.downsampling
    pixels = dataclasses.replace(vae, tiling=tiling).decode(latents)[..., margin:-margin, margin:-margin]
    steps = pixels.diff(dim=-1).abs().amax((0, 1, 2, 3))
    borders = {place * unit for span in tiling.spans(latents.shape[-1]) for place in span}
    across = torch.tensor([margin + place + 1 in borders for place in range(len(steps))])
    return steps[across].max().item(), steps[~across].max().item()


def test_threads_share_one(vae: KLAutoencoder) -> None:
    shared = dataclasses.replace(vae, tiling=Tiling(size=8, overlap=2), slicing=True)
    inputs = [latents_of(vae, 8, width, rows=2) for width in (6, 10, 14, 18)]
    expected = [shared.decode(x) for x in inputs]
    before = {name: weight.clone() for name, weight in vae.module.state_dict().items()}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            for found, wanted in zip(pool.map(shared.decode, inputs), expected, strict=True):
                assert torch.equal(found, wanted)
    assert all(torch.equal(weight, before[name]) for name, weight in vae.module.state_dict().items())


def test_upcasting(folders: dict[str, Path], tmp_path: Path) -> None:
    exact = load_kl(folders["quantised"])
    edit_config(copied(folders["quantised"], tmp_path), force_upcast=True)
    upcast = load_kl(tmp_path, dtype=torch.float16)
    assert {weight.dtype for weight in upcast.module.parameters()} == {torch.float32}
    pixels, latents = pictures(16, 16).half(), latents_of(exact, 8, 8).half()
    assert torch.equal(upcast.encode(pixels), exact.encode(pixels.float()))
    assert torch.equal(upcast.decode(latents), exact.decode(latents.float()))
    assert upcast.decode(latents).dtype == upcast.encode(pixels, latents).dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float32):
        assert {weight.dtype for weight in load_kl(tmp_path, dtype=dtype).module.parameters()} == {dtype}
    kept = load_kl(folders["quantised"], dtype=torch.float16)
    assert {weight.dtype for weight in kept.module.parameters()} == {torch.float16}


def test_upcasting_of_one_that_was_moved(folders: dict[str, Path], tmp_path: Path) -> None:
    edit_config(copied(folders["quantised"], tmp_path), force_upcast=True)
    whole, cpu = load_kl(tmp_path), torch.device("cpu")
    stays = moved(whole, cpu, torch.float16)
    assert {weight.dtype for weight in stays.module.parameters()} == {torch.float32}
    half = dataclasses.replace(whole, module=moved(whole.module, cpu, torch.float16))
    rounded = moved(half, cpu, torch.float32)
    pixels, latents = pictures(16, 16), latents_of(half, 8, 8)
    assert torch.equal(half.encode(pixels), rounded.encode(pixels))
    assert torch.equal(half.decode(latents), rounded.decode(latents))
    assert {weight.dtype for weight in half.module.parameters()} == {torch.float16}, "the module is left alone"


def test_bfloat16_is_near(folders: dict[str, Path]) -> None:
    exact, rounded = load_kl(folders["shifted"]), load_kl(folders["shifted"], dtype=torch.bfloat16)
    latents = latents_of(exact, 6, 6)
    decoded = rounded.decode(latents)
    assert decoded.dtype == torch.float32
    assert 1e-4 < worst(decoded, exact.decode(latents)) < 0.1


BAD_PIXELS = {
    "height": ((1, 3, 1, 15, 16), "height is 15 pixels; it must be a multiple of 2, such as 14 or 16"),
    "width": ((1, 3, 1, 16, 1), "width is 1 pixels; it must be a multiple of 2, such as 2"),
    "channels": ((1, 4, 1, 16, 16), r"pixels have shape \[1, 4, 1, 16, 16\]; it must be \[rows, 3, 1, height, width\]"),
    "frames": ((1, 3, 2, 16, 16), "pixels have 2 frames; this autoencoder takes pictures"),
    "no frames": ((1, 3, 16, 16), r"pixels have shape \[1, 3, 16, 16\]"),
    "no rows": ((0, 3, 1, 16, 16), r"pixels have shape \[0, 3, 1, 16, 16\]"),
}


@pytest.mark.parametrize("bad", BAD_PIXELS)
def test_bad_pixels(bad: str, vae: KLAutoencoder) -> None:
    shape, message = BAD_PIXELS[bad]
    with pytest.raises(ValueError, match=message):
        vae.encode(torch.zeros(shape))


def test_other_bad_input(vae: KLAutoencoder) -> None:
    with pytest.raises(ValueError, match=r"latents have shape \[1, 16, 1, 4, 4\]; it must be \[rows, 4, 1"):
        vae.decode(torch.zeros(1, 16, 1, 4, 4))
    with pytest.raises(ValueError, match="latents have 3 frames"):
        vae.decode(torch.zeros(1, 4, 3, 4, 4))
    with pytest.raises(ValueError, match=r"pixels are torch\.uint8"):
        vae.encode(torch.zeros(1, 3, 1, 4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"noise has shape \[1, 4, 2, 2\]; the latents have \[1, 4, 1, 2, 2\]"):
        vae.encode(torch.zeros(1, 3, 1, 4, 4), torch.zeros(1, 4, 2, 2))
