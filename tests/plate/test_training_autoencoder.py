"""The autoencoder's training: its losses, and that a run can be broken off anywhere."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from calotype.plate.training import autoencoder, crops
from calotype.vae.plate import PlateVAE, PlateVAEConfig

CONFIG = PlateVAEConfig(encoder_widths=(8, 8), decoder_widths=(8, 8, 8), decoder_blocks=(1, 1, 1))


def _train(run: Path, *, steps: int = 2, start: Path | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    arguments = argparse.Namespace(
        run=run,
        start=start,
        steps=steps,
        decoder_steps=2,
        batch=2,
        rate=1e-3,
        noise=0.15,
        energy=1.0,
        coarse=30.0,
        redrawn=None,
        scenes=2,
        test=2,
        every=1,
        seed=0,
    )
    autoencoder.train(arguments, CONFIG)
    return load_file(run / "vae.safetensors")


def test_a_broken_off_run_goes_on_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _train(tmp_path / "whole")
    save, saved = autoencoder.save_state, list[int]()

    def broken_off(path: Path, state: dict[str, object], *, step: int) -> None:
        save(path, state, step=step)
        saved.append(step)
        if step < 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(autoencoder, "save_state", broken_off)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            _train(tmp_path / "broken")
    broken = _train(tmp_path / "broken")
    assert saved == [1, 2, 3, 4]
    assert whole.keys() == broken.keys()
    assert all(torch.equal(whole[name], broken[name]) for name in whole)


def test_the_second_phase_trains_the_decoder_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    vae = PlateVAE(CONFIG)
    vae.latent_std.fill_(2.0)
    start = tmp_path / "start.safetensors"
    save_file(vae.state_dict(), start)
    trained = _train(tmp_path / "run", steps=0, start=start)
    kept = {name for name, value in vae.state_dict().items() if torch.equal(trained[name], value)}
    assert kept == {name for name in trained if not name.startswith("decoder.")}


def test_crops_lie_in_the_scene_and_repeat_with_the_seed() -> None:
    first, second = (crops.crops(np.random.default_rng(3), 4) for _ in range(2))
    assert first.shape == (4, 3, 64, 64)
    assert -1 <= first.min() < first.max() <= 1
    assert torch.equal(first, second)


def test_the_loss_is_its_formula() -> None:
    target = torch.zeros(1, 1, 4, 4)
    flat = torch.full_like(target, 0.5)
    assert autoencoder.reconstruction_loss(flat, target).item() == pytest.approx(0.5 + 4 * 0.25)
    edge = target.clone()
    edge[..., 2:] = 1.0  # |error| 1/2, square 1/2, one of three differences a row, one of one at half resolution
    expected = 0.5 + 4 * 0.5 + 1 / 3 + 0.5 * 1
    assert autoencoder.reconstruction_loss(edge, target).item() == pytest.approx(expected)


def test_statistics_are_those_of_the_latents() -> None:
    torch.manual_seed(2)
    vae = PlateVAE(CONFIG)
    autoencoder.measure_latents(vae, np.random.default_rng(0), 3)
    pixels = torch.from_numpy(
        np.stack([autoencoder.render(autoencoder.training_sample(r).scene) for r in [np.random.default_rng(0)] * 3])
    )
    with torch.no_grad():
        latents = vae.encode(pixels.permute(0, 3, 1, 2)[:, :, None].float() / 127.5 - 1)
    assert torch.allclose(latents.mean((0, 2, 3, 4)), torch.zeros(8), atol=1e-4)
    assert torch.allclose(latents.std((0, 2, 3, 4)), torch.ones(8), atol=1e-4)


def test_the_energy_loss_sees_blur_but_not_a_shade() -> None:
    target = torch.zeros(1, 1, 9, 9)
    target[..., 4:] = 1.0
    blurred = torch.nn.functional.avg_pool2d(torch.nn.functional.pad(target, (1, 1, 1, 1), mode="replicate"), 3, 1)
    assert autoencoder.energy_loss(target + 0.3, target).item() == pytest.approx(0, abs=1e-6)
    assert autoencoder.energy_loss(blurred, target).item() > 0.05
    step = torch.zeros(1, 1, 5, 5)
    step[..., 2:] = 1.0
    expected = (0.25 + 1e-4) ** 0.5 - 0.01  # one of four columns of differences is 1
    assert autoencoder.energy_loss(step, torch.zeros_like(step)).item() == pytest.approx(expected, abs=1e-6)


def test_the_coarse_loss_sees_shapes_but_not_fine_texture() -> None:
    target = torch.zeros(1, 3, 8, 8)
    texture = torch.ones(1, 3, 8, 8)
    texture[..., ::2] = -1
    assert autoencoder.coarse_loss(texture, target).item() == pytest.approx(0, abs=1e-7)
    shape = target.clone()
    shape[..., :4, :4] = 1
    assert autoencoder.coarse_loss(shape, target).item() == pytest.approx(0.25)
