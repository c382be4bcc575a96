"""The training of what draws frames between key frames."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from calotype.plate.training import between, motions
from calotype.vae.plate import PlateClipVAE, PlateClipVAEConfig, PlateVAE

CONFIG = PlateClipVAEConfig(
    encoder_widths=(8, 8), decoder_widths=(8, 8, 8), decoder_blocks=(1, 1, 1), between_blocks=(1, 1)
)


@pytest.fixture
def picture_vae(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "vae.safetensors"
    save_file({name: value.contiguous() for name, value in PlateVAE(CONFIG).state_dict().items()}, path)
    return path


def arguments(vae: Path, run: Path, **changes: object) -> argparse.Namespace:
    values: dict[str, object] = {"vae": vae, "run": run, "steps": 2, "batch": 2, "rate": 1e-3, "noise": 0.1}
    values |= {"energy": 1.0, "coarse": 30.0, "test": 1, "every": 1, "seed": 0}
    return argparse.Namespace(**(values | changes))


def test_groups_are_consecutive_frames_and_crops_hold_the_object() -> None:
    groups = between.draw_groups(np.random.default_rng(2), 6)
    assert groups.frames.shape == (6, 3, 4, 128, 128)
    assert torch.equal(groups.after, groups.frames[:, :, -1])
    assert all(x % 8 == y % 8 == 0 and max(x, y) <= 32 for x, y in groups.corners)
    clip = motions.random_clip("one", np.random.default_rng(5))
    x, y = between.corner(clip, 8, np.random.default_rng(0))
    middle = clip.actors[0].poses[10]
    assert x <= middle.x + middle.size // 2 <= x + between.CROP
    assert y <= middle.y + middle.size // 2 <= y + between.CROP


def test_only_what_is_between_learns_and_a_broken_off_run_goes_on(
    picture_vae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    between.train(arguments(picture_vae, tmp_path / "whole"), CONFIG)
    save = between.save_state

    def broken_off(path: Path, state: dict[str, object], *, step: int) -> None:
        save(path, state, step=step)
        if step == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(between, "save_state", broken_off)
        with pytest.raises(KeyboardInterrupt):
            between.train(arguments(picture_vae, tmp_path / "broken"), CONFIG)
    between.train(arguments(picture_vae, tmp_path / "broken"), CONFIG)
    whole, broken = (load_file(tmp_path / name / "vae.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
    before = load_file(picture_vae)
    assert all(torch.equal(whole[name], value) for name, value in before.items())
    fresh = PlateClipVAE(CONFIG)
    between.start_from(fresh, picture_vae)
    tail = [name for name in whole if name.startswith("between.tail.")]
    assert tail
    assert all(not torch.equal(whole[name], fresh.state_dict()[name]) for name in tail if name.endswith("weight"))


def test_the_loss_falls(picture_vae: Path) -> None:
    torch.manual_seed(1)
    vae, options = PlateClipVAE(CONFIG), arguments(picture_vae, picture_vae.parent)
    between.start_from(vae, picture_vae)
    groups, optimiser = (
        between.draw_groups(np.random.default_rng(0), 2),
        torch.optim.Adam(vae.between.parameters(), 3e-3),
    )
    losses: list[float] = []
    for _ in range(25):
        loss = between.group_loss(vae, groups, torch.Generator().manual_seed(0), options)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
