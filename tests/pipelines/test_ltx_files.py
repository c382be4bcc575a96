"""LTX-Video's folders and files: loaded, saved, told apart, run from the command line."""

import json
import shutil

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

import calotype
import calotype.pipelines.inspection
from calotype.cli import main
from calotype.pipelines.clips import read_clip
from calotype.pipelines.ltx import DECODING, DISTILLED_SIGMAS, SCHEDULER, linear_quadratic_sigmas

from ..fake_hub import Hub
from ..tiny_ltx import in_original_layout
from ..tiny_ltx_pipeline import LTXPipelines, flow_match, ltx_pipeline
from ..tiny_ltx_vae import in_original_layout as vae_in_original_layout
from ..tiny_wan_pipeline import picture

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SMALL = {"height": 32, "width": 32}
TOLD = {"num_frames": 9, "num_inference_steps": 2, "seed": 3, "output_type": "np", **SMALL}
IN_FILES = {"num_attention_heads": 32, "attention_head_dim": 2, "cross_attention_dim": 64, "norm_eps": 1e-6}


@pytest.fixture(scope="module")
def ltx(tmp_path_factory):
    return LTXPipelines(tmp_path_factory.mktemp("ltx"))


@pytest.mark.parametrize("kind", ["plain", "later"])
def test_a_folder_that_is_saved_is_the_same_model(ltx, kind, tmp_path):
    import diffusers

    ours, _ = ltx.both(kind)
    ours.save(tmp_path / "saved")
    again = calotype.load(tmp_path / "saved")
    assert again.family == ours.family
    for given in ({}, {"image": picture(32, 32)}):
        assert numpy.array_equal(again("a cat", **TOLD, **given).videos, ours("a cat", **TOLD, **given).videos)
    kinds = {"plain": diffusers.LTXPipeline, "later": diffusers.LTXConditionPipeline}
    assert isinstance(diffusers.DiffusionPipeline.from_pretrained(tmp_path / "saved"), kinds[kind])


def test_folders_of_the_other_class(ltx, tmp_path):
    shutil.copytree(ltx.folder("plain"), tmp_path / "model")
    index = tmp_path / "model" / "model_index.json"
    index.write_text(index.read_text().replace("LTXPipeline", "LTXImageToVideoPipeline"))
    ours, _ = ltx.both("plain")
    assert numpy.array_equal(calotype.load(tmp_path / "model")("a cat", **TOLD).videos, ours("a cat", **TOLD).videos)


@pytest.mark.parametrize(("kind", "version"), [("plain", "0.9.0"), ("later", "0.9.5")])
def test_a_file_of_denoiser_and_autoencoder(kind, version, tmp_path):
    """In Lightricks' layout; the scheduler is that of the published models."""
    published = {name: value for name, value in SCHEDULER.entries().items() if value is not None}
    scheduler = flow_match(**{name: value for name, value in published.items() if name != "_class_name"})
    scheduler = None if kind == "later" else scheduler
    theirs = ltx_pipeline(tmp_path / "model", kind, scheduler=scheduler, **IN_FILES)
    weights = vae_in_original_layout(theirs.vae.state_dict(), version)
    weights |= in_original_layout(theirs.transformer.state_dict())
    save_file(weights, tmp_path / "ltx.safetensors")
    whole = calotype.load(tmp_path / "model", vae=tmp_path / "ltx.safetensors")  # whose epsilon is not in the file
    pipe = calotype.load(tmp_path / "ltx.safetensors", encoders=tmp_path / "model")
    assert (pipe.family, pipe.recipe) == (whole.family, whole.recipe)
    assert numpy.array_equal(pipe("a cat", **TOLD).videos, whole("a cat", **TOLD).videos)
    pipe.save(tmp_path / "saved")
    again = calotype.load(tmp_path / "saved")
    assert again.family == whole.family
    assert numpy.array_equal(again("a cat", **TOLD).videos, whole("a cat", **TOLD).videos)
    found = calotype.pipelines.inspection.inspect_model(tmp_path / "model")
    assert {component.name for component in found.components} == {"transformer", "vae", "text_encoder"}
    with pytest.raises(ValueError, match="text encoder 't5'"):
        calotype.load(tmp_path / "ltx.safetensors")


def test_models_of_few_steps(tmp_path):
    """They are known by their name, also once they were saved, and run at the noise levels that they were made for."""
    theirs = ltx_pipeline(tmp_path / "model", "later", **IN_FILES)
    file = tmp_path / "ltxv-2b-0.9.8-distilled.safetensors"
    save_file(in_original_layout(theirs.transformer.state_dict()), file)
    pipe = calotype.load(file, encoders=tmp_path / "model", vae=tmp_path / "model")
    assert (pipe.recipe.num_inference_steps, pipe.recipe.guidance_scale) == (8, 1.0)
    pipe.save(tmp_path / "saved")
    for each in (pipe, calotype.load(tmp_path / "saved")):
        plan = each.encode(calotype.Request(prompt="a cat", num_frames=1, **SMALL)).plan
        assert plan.schedule.sigmas == (*DISTILLED_SIGMAS, 0.0)
        assert not plan.guidance.needs_negative and plan.decoding == DECODING
    given = {"prompt": "a cat", "num_frames": 1, "num_inference_steps": 3, "guidance_scale": 3.0, **SMALL}
    plan = pipe.encode(calotype.Request(**given)).plan
    assert plan.schedule.sigmas == (*linear_quadratic_sigmas(3), 0.0)
    assert [line.split(":")[0] for line in plan.warnings] == ["guidance_scale 3.0", "num_inference_steps 3"]
    whole = calotype.load(tmp_path / "model")
    assert (whole.recipe.num_inference_steps, whole.recipe.guidance_scale) == (50, 3.0)
    assert (whole.recipe.width, whole.recipe.height, whole.recipe.num_frames, whole.recipe.fps) == (704, 512, 161, 25)


def test_weights_may_stay_in_their_files(ltx):
    ours, _ = ltx.both("plain")
    told = {**TOLD, "image": picture(32, 32)}
    expected = ours("a cat", **told).latents
    for offload in ("encoders", "blocks"):
        lean = calotype.load(ltx.folder("plain"), offload=offload)
        assert torch.equal(lean("a cat", **told).latents, expected)
    assert all(parameter.is_meta for parameter in lean.denoiser.blocks.parameters())


def test_a_copy_in_another_dtype(ltx):
    ours, _ = ltx.both("timed")
    half = ours.to(dtype="bfloat16")
    result = half("a cat", **TOLD)
    assert result.latents.dtype is torch.float32
    assert half.vae.module.decoder.conv_in.conv.weight.dtype is torch.bfloat16
    assert ours.vae.module.decoder.conv_in.conv.weight.dtype is torch.float32
    assert 0 < numpy.abs(result.videos - ours("a cat", **TOLD).videos).mean() < 0.1


def test_only_what_a_repository_has_is_downloaded(ltx, monkeypatch):
    folder = ltx.folder("plain")
    found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    hub = Hub(monkeypatch, folder, found)
    calotype.load("owner/name")
    folders = {name.split("/")[0] for name in hub.asked[-1]["allow_patterns"] if "/" in name}
    assert folders == {"text_encoder", "tokenizer", "transformer", "vae", "scheduler"}


def test_parts_that_do_not_fit(ltx, tmp_path):
    shutil.copytree(ltx.folder("plain"), tmp_path / "model")
    config = tmp_path / "model" / "transformer" / "config.json"
    entries = json.loads(config.read_text())
    config.write_text(json.dumps({**entries, "caption_channels": 20}))
    with pytest.raises(ValueError, match="has d_model 32; the transformer needs 20"):
        calotype.load(tmp_path / "model")
    config.write_text(json.dumps({**entries, "in_channels": 5, "out_channels": 5}))
    with pytest.raises(ValueError, match="has latent_channels 4; the transformer needs 5"):
        calotype.load(tmp_path / "model")
    file = ltx.folder("plain") / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({**load_file(file), "audio_patchify_proj.weight": torch.ones(2, 2)}, tmp_path / "ltx2.safetensors")
    with pytest.raises(ValueError, match="LTX-2"):
        calotype.load(tmp_path / "ltx2.safetensors", encoders=tmp_path / "model", vae=tmp_path / "model")


def test_the_command_makes_clips(ltx, tmp_path, capsys):
    """`--fps` is what the model is told, too."""
    folder, out = ltx.folder("timed"), tmp_path / "cat.webp"
    picture(40, 32).save(tmp_path / "first.png")
    words = ["video", "a", "cat", "--model", str(folder), "-o", str(out), "--frames", "9", "--steps", "1"]
    assert main([*words, "--size", "32", "--seed", "3", "--fps", "10", "--image", str(tmp_path / "first.png")]) == 0
    clip = read_clip(out)
    assert (clip.frames.shape, clip.fps) == ((9, 32, 32, 3), 10)
    assert "image: 40x32 is resized to 32x32" in capsys.readouterr().err
    ours, _ = ltx.both("timed")
    told = {**TOLD, "num_inference_steps": 1, "image": picture(40, 32)}
    at_10, at_25 = (ours("a cat", **told, **given).clips()[0] for given in ({"frame_rate": 10}, {}))
    assert not numpy.array_equal(at_10, at_25)
