"""Clips of plate: of a tiny one with random weights, which makes pictures too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import calotype
from calotype.cli import main
from calotype.denoisers.plate import PlateDenoiser, PlateDenoiserConfig
from calotype.pipelines.base import last
from calotype.pipelines.image import ImagePipeline
from calotype.pipelines.replay import replay
from calotype.pipelines.result import GRID_GAP
from calotype.vae.plate import PlateClipVAE, PlateClipVAEConfig

from ..conftest import randomise

PROMPT = "a fox moves left on a beach"


@pytest.fixture(scope="module")
def clip_folder(tiny_plate: ImagePipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Groups of 4 frames, at most 3 latent frames: 9 frames."""
    torch.manual_seed(0)
    assert isinstance(tiny_plate.denoiser, PlateDenoiser)
    sizes = vars(tiny_plate.denoiser.config) | {"frames": 3}
    denoiser = PlateDenoiser(PlateDenoiserConfig(**sizes))
    vae = PlateClipVAE(
        PlateClipVAEConfig(
            encoder_widths=(8, 8), decoder_widths=(8, 8, 8), decoder_blocks=(1, 1, 1), between_blocks=1, between_width=8
        )
    )
    for module in (denoiser, vae):
        randomise(module)
    folder = tmp_path_factory.mktemp("clips") / "tiny"
    replace(tiny_plate, denoiser=denoiser, vae=vae).save(folder)
    return folder


@pytest.fixture(scope="module")
def pipe(clip_folder: Path) -> ImagePipeline:
    return calotype.load(clip_folder)


def frames(pipe: ImagePipeline, prompt: Any = PROMPT, **arguments: Any) -> torch.Tensor:
    """[B, F, 3, H, W]."""
    videos = pipe(prompt, output_type="pt", progress=False, **({"seed": 3} | arguments)).videos
    assert isinstance(videos, torch.Tensor)
    return videos


def test_a_preview_shows_the_latent_frames_of_each_clip(pipe: ImagePipeline) -> None:
    step = last(pipe.stream([PROMPT, "a cat grows"], num_frames=9, seed=3))
    sheets = pipe.preview(step)
    alone = [pipe.preview(replace(step, denoised=step.denoised[:, :, n : n + 1])) for n in range(3)]
    side = alone[0][0].width
    across = side + GRID_GAP
    assert [sheet.size for sheet in sheets] == [(across + side, across + side)] * 2
    for row, sheet in enumerate(sheets):
        for n, (left, top) in enumerate(((0, 0), (across, 0), (0, across))):
            assert sheet.crop((left, top, left + side, top + side)).tobytes() == alone[n][row].tobytes()
    assert sheets[0].tobytes() != sheets[1].tobytes()


def test_a_picture_unless_frames_are_asked_for(pipe: ImagePipeline) -> None:
    result = pipe(PROMPT, seed=3, progress=False)
    assert result.videos is None and result.fps is None
    assert len(result.pil()) == 1 and result.latents.shape[2] == 1
    assert result.manifest is not None and result.manifest.task == "text-to-image"
    assert "num_frames" not in (result.manifest.extra or {})
    single = pipe(PROMPT, seed=3, num_frames=1, progress=False)
    assert [clip.shape for clip in single.clips()] == [(1, 32, 32, 3)]
    assert torch.equal(single.latents, result.latents)
    assert single.manifest is not None and single.manifest.task == "text-to-video"


@pytest.mark.parametrize("count", range(1, 10))
def test_exactly_the_frames_asked_for(pipe: ImagePipeline, count: int) -> None:
    result = pipe(PROMPT, seed=3, num_frames=count, width=48, progress=False)
    (clip,) = result.clips()
    assert clip.shape == (count, 32, 48, 3)
    made = 1 + 4 * -(-(count - 1) // 4)
    cut = f"num_frames {count}: the model makes {made}, of which the first {count} are returned"
    assert result.warnings == (() if made == count else (cut,))
    assert result.fps == pipe.recipe.fps


def test_frames_differ_and_a_row_is_that_row_alone(pipe: ImagePipeline) -> None:
    two = frames(pipe, [PROMPT, "two cats"], seed=[3, 4], num_frames=9)
    assert two.shape == (2, 9, 3, 32, 32)
    assert all((two[:, n] - two[:, n + 1]).abs().max() > 1e-3 for n in range(8))
    for row, (prompt, seed) in enumerate(((PROMPT, 3), ("two cats", 4))):
        alone = frames(pipe, prompt, seed=seed, num_frames=9)[0]
        torch.testing.assert_close(two[row], alone, atol=1e-4, rtol=0)
    again = frames(pipe, num_videos_per_prompt=2, seed=3, num_frames=9)
    torch.testing.assert_close(again[0], frames(pipe, num_frames=9)[0], atol=1e-4, rtol=0)


def test_streamed_frames_are_those_of_the_whole_clip(pipe: ImagePipeline) -> None:
    groups = [*pipe.stream_frames(PROMPT, seed=3, num_frames=7, output_type="pt")]
    assert [group.shape[1] for group in groups if isinstance(group, torch.Tensor)] == [1, 4, 2]
    whole = torch.cat([group for group in groups if isinstance(group, torch.Tensor)], dim=1)
    assert torch.equal(whole, frames(pipe, num_frames=7))


def test_latents_alone_are_a_clip(pipe: ImagePipeline) -> None:
    result = pipe(PROMPT, seed=3, num_frames=9, progress=False)
    decoded = pipe.decode(result.latents)
    assert decoded.images is None
    assert np.array_equal(decoded.clips()[0], result.clips()[0])
    assert pipe.decode(result.latents[:, :, :1]).videos is None


def test_from_a_clip(pipe: ImagePipeline) -> None:
    clip = np.random.default_rng(0).random((9, 32, 32, 3), dtype=np.float32)
    kept = frames(pipe, video=clip, strength=0.0)[0]
    pixels = torch.from_numpy(clip).permute(3, 0, 1, 2)[None] * 2 - 1
    trip = (pipe.vae.decode(pipe.vae.encode(pixels))[0].transpose(0, 1) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(kept, trip, atol=1e-4, rtol=0)
    assert (frames(pipe, video=clip, strength=1.0)[0] - kept).abs().max() > 1e-2
    assert frames(pipe, video=clip[:6], strength=0.5).shape[1] == 6


def test_saved_and_loaded(pipe: ImagePipeline, tmp_path: Path) -> None:
    assert pipe.recipe.max_frames == 9
    pipe.save(tmp_path / "again")
    again = calotype.load(tmp_path / "again")
    assert again.recipe == pipe.recipe
    assert torch.equal(frames(again, num_frames=5), frames(pipe, num_frames=5))


def test_replay(pipe: ImagePipeline, tmp_path: Path) -> None:
    pipe(PROMPT, seed=3, num_frames=5, progress=False).save(tmp_path / "a.webp")
    again = replay(tmp_path / "a.webp", pipeline=pipe)
    assert again.bit_equal and again.clip is not None and len(again.clip.frames) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_frames": 10}, "num_frames is 10; this model makes clips of up to 9 frames"),
        ({"num_frames": 0}, "num_frames is 0; it must be from 1"),
        ({"video": np.zeros((10, 32, 32, 3))}, "frames of video are 10; this model makes clips of up to 9 frames"),
        ({"video": np.zeros((5, 32, 32, 3)), "num_frames": 4}, "num_frames is 4, but video has 5"),
        ({"image": np.zeros((32, 32, 3)), "num_frames": 5}, "image: a picture starts from it; clips of this model"),
        ({"image": np.zeros((32, 32, 3)), "num_frames": 1}, "image: a picture starts from it; clips of this model"),
        ({"image": np.zeros((32, 32, 3)), "video": np.zeros((5, 32, 32, 3))}, "image and video: a picture starts"),
        ({"latents": torch.zeros(1, 8, 1, 4, 4), "num_frames": 5}, "latents have shape .* needs"),
    ],
)
def test_what_clips_cannot_be(pipe: ImagePipeline, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipe(PROMPT, progress=False, **arguments)


def test_a_picture_has_no_frames_to_stream(pipe: ImagePipeline) -> None:
    with pytest.raises(ValueError, match="num_frames is not given: without it this model makes a picture"):
        pipe.stream_frames(PROMPT)


def test_a_model_of_pictures_makes_none(tiny_plate: ImagePipeline) -> None:
    with pytest.raises(ValueError, match="num_frames: plate does not use this argument"):
        tiny_plate(PROMPT, num_frames=5)


def test_the_command_line(clip_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(clip_folder), "--seed", "3"]
    assert main(["video", PROMPT, *model, "-o", str(tmp_path / "a.webp")]) == 0
    assert len(calotype.read_clip(tmp_path / "a.webp").frames) == 9
    assert main(["video", PROMPT, *model, "--frames", "1", "-o", str(tmp_path / "b.gif")]) == 0
    assert len(calotype.read_clip(tmp_path / "b.gif").frames) == 1
    again = ["--video", str(tmp_path / "a.webp"), "--strength", "0.5"]
    assert main(["video", PROMPT, *model, *again, "-o", str(tmp_path / "c.webp")]) == 0
    assert len(calotype.read_clip(tmp_path / "c.webp").frames) == 9
    assert main(["image", PROMPT, *model, "-o", str(tmp_path / "a.png")]) == 0
    capsys.readouterr()
    assert main(["video", PROMPT, *model, "--frames", "10", "-o", str(tmp_path / "d.webp")]) == 2
    assert "num_frames is 10; this model makes clips of up to 9 frames" in capsys.readouterr().err
    assert main(["video", PROMPT, *model, "--image", str(tmp_path / "a.png"), "-o", str(tmp_path / "d.webp")]) == 2
    assert "clips of this model cannot begin with one" in capsys.readouterr().err
    assert not (tmp_path / "d.webp").exists()
