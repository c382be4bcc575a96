"""Shards of encoded scenes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from calotype.plate.training import latents
from calotype.plate.training.captions import training_sample
from calotype.plate.training.motions import clip_classes, render_clip, training_clip
from calotype.plate.training.scenes import render
from calotype.vae.plate import PlateVAE, PlateVAEConfig


@pytest.fixture(scope="module")
def vae() -> PlateVAE:
    torch.manual_seed(0)
    return PlateVAE(PlateVAEConfig(encoder_widths=(8, 8), decoder_widths=(8, 8, 8), decoder_blocks=(1, 1, 1)))


def test_a_broken_off_run_goes_on_with_the_same_bytes(vae: PlateVAE, tmp_path: Path) -> None:
    latents.write_shards(vae, tmp_path, 2, count=2)
    first, second = sorted(tmp_path.iterdir())
    kept, again = first.stat().st_mtime_ns, second.read_bytes()
    second.unlink()
    latents.write_shards(vae, tmp_path, 2, count=2)
    assert first.stat().st_mtime_ns == kept
    assert second.read_bytes() == again != first.read_bytes()
    latents.write_shards(vae, tmp_path / "late", 1, first=1, count=2)
    assert (tmp_path / "late" / second.name).read_bytes() == again


def test_a_shard_holds_the_scenes(vae: PlateVAE, tmp_path: Path) -> None:
    latents.write_shard(latents.make_shard(vae, 5, 1, 3), tmp_path / "shard.safetensors")
    shard = latents.read_shard(tmp_path / "shard.safetensors")
    random = np.random.default_rng((5, 1))
    samples = [training_sample(random) for _ in range(3)]
    assert shard.captions == tuple(sample.caption for sample in samples)
    assert shard.latents.dtype == torch.float16
    for sample, x, classes in zip(samples, shard.latents, shard.classes, strict=True):
        pixels = torch.from_numpy(render(sample.scene)).permute(2, 0, 1)[None, :, None].float() / 127.5 - 1
        with torch.no_grad():
            assert torch.allclose(x.float(), vae.encode(pixels)[0, :, 0], atol=2e-3)
        assert {int(n) for n in classes.unique()} - {120} == {sprite.index for sprite in sample.scene.sprites}


def test_a_shard_of_clips_holds_their_key_frames(vae: PlateVAE, tmp_path: Path) -> None:
    latents.write_shard(latents.make_shard(vae, 5, 1, 2, latents.drawn_clip), tmp_path / "shard.safetensors")
    shard = latents.read_shard(tmp_path / "shard.safetensors")
    random = np.random.default_rng((5, 1))
    clips = [training_clip(random) for _ in range(2)]
    assert shard.captions == tuple(clip.caption for clip in clips)
    assert shard.latents.shape == (2, 8, 5, 16, 16)
    assert shard.classes.shape == (2, 5, 8, 8)
    for clip, x, classes in zip(clips, shard.latents, shard.classes, strict=True):
        picture = render_clip(clip, [8])[0]
        pixels = torch.from_numpy(picture).permute(2, 0, 1)[None, :, None].float() / 127.5 - 1
        with torch.no_grad():
            assert torch.allclose(x[:, 2].float(), vae.encode(pixels)[0, :, 0], atol=2e-3)
        assert np.array_equal(classes[2].numpy(), clip_classes(clip, 8))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    save_file(PlateVAE(PlateVAEConfig()).state_dict(), tmp_path / "vae.safetensors")
    options = ["--vae", str(tmp_path / "vae.safetensors"), "--out", str(tmp_path / "out"), "--shards", "1"]
    monkeypatch.setattr("sys.argv", ["latents", *options, "--count", "1", "--threads", str(torch.get_num_threads())])
    latents.main()
    assert latents.read_shard(tmp_path / "out" / "latents-0000.safetensors").latents.shape == (1, 8, 16, 16)
