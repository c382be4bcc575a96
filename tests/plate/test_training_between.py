"""The training of what draws frames between key frames."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from calotype.plate.training import between, motions
from calotype.plate.training.scenes import MEDIUM, SIDE, random_backdrop
from calotype.vae.between import warped
from calotype.vae.plate import PlateClipVAE, PlateClipVAEConfig, PlateVAE

CONFIG = PlateClipVAEConfig(
    encoder_widths=(8, 8), decoder_widths=(8, 8, 8), decoder_blocks=(1, 1, 1), between_blocks=1, between_width=8
)


@pytest.fixture
def picture_vae(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "vae.safetensors"
    save_file({name: value.contiguous() for name, value in PlateVAE(CONFIG).state_dict().items()}, path)
    return path


def arguments(vae: Path, run: Path, **changes: object) -> argparse.Namespace:
    values: dict[str, object] = {"vae": vae, "run": run, "steps": 2, "batch": 2, "rate": 1e-3, "noise": 0.1}
    values |= {"energy": 1.0, "coarse": 30.0, "moves": 0.1, "reshaped": 0.5, "test": 1, "every": 1, "seed": 0}
    return argparse.Namespace(**(values | changes))


def test_groups_are_consecutive_frames_and_crops_hold_the_object() -> None:
    groups = between.draw_groups(np.random.default_rng(2), 6)
    assert groups.frames.shape == (6, 3, 3, 128, 128)
    assert groups.moves_before.shape == groups.moves_after.shape == (6, 3, 2, 32, 32)
    assert groups.known.shape == (6, 3, 32, 32)
    assert all(x % 8 == y % 8 == 0 and max(x, y) <= 32 for x, y in groups.corners)
    clip = motions.random_clip("one", np.random.default_rng(5))
    x, y = between.corner(clip, 8, np.random.default_rng(0))
    middle = clip.actors[0].poses[10]
    assert x <= middle.x + middle.size // 2 <= x + between.CROP
    assert y <= middle.y + middle.size // 2 <= y + between.CROP


@pytest.mark.parametrize("motion", motions.ONE)
def test_true_moves_lead_to_what_is_seen_in_both_key_frames(motion: motions.Motion) -> None:
    middle = (SIDE - MEDIUM) // 2
    actor = motions.Actor(index=3, motion=motion, poses=motions.poses_of(motion, middle, middle))
    backdrop = random_backdrop("snow", np.random.default_rng(0))
    clip = motions.Clip(backdrop=backdrop, actors=(actor,), caption="", background=None)
    start = {"shrink": 8, "spin": 0}.get(motion, 4)  # where it has begun, and is not seen from the side
    before, after, known = between.true_moves(clip, start)
    pixels = (
        torch.from_numpy(motions.render_clip(clip, range(start, start + 5))).permute(0, 3, 1, 2).float() / 127.5 - 1
    )
    sure = functional.interpolate((known == 1).float()[:, None], scale_factor=4)[:, 0] > 0
    assert sure.any(dim=(1, 2)).all()
    assert (known == between.STILL_WEIGHT).any() and (known == 0).any()
    for key, moves in ((pixels[:1], before), (pixels[4:], after)):
        assert not moves[:, :, 0, 0].any()
        off, unmoved = ((each - pixels[1:4]).abs().mean(1)[sure].mean() for each in (warped(key, moves[None]), key))
        assert off < 0.4 * unmoved


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
    torch.manual_seed(0)
    fresh = PlateClipVAE(CONFIG).state_dict()
    learnt = [name for name in whole if name.startswith("between.") and name.endswith("weight")]
    assert learnt and all(not torch.equal(whole[name], fresh[name]) for name in learnt)


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
