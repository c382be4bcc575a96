"""Wan's folders, files and copies: loaded, saved, told apart from what does not fit."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

import calotype
import calotype.pipelines.inspection

from ..fake_hub import Hub
from ..tiny_wan import in_original_layout
from ..tiny_wan_pipeline import picture, unipc, wan_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SMALL = {"height": 16, "width": 16}


def test_only_what_a_repository_has_is_downloaded(wan, monkeypatch):
    pictures = {"image_encoder", "image_processor"}
    for kind, others in (("text", set()), ("experts", {"transformer_2"}), ("pictures", pictures)):
        folder, _ = wan.made(kind)
        found = {
            path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()
        }
        hub = Hub(monkeypatch, folder, found)
        calotype.load("owner/name")
        folders = {name.split("/")[0] for name in hub.asked[-1]["allow_patterns"] if "/" in name}
        assert folders == {"text_encoder", "tokenizer", "transformer", "vae", "scheduler"} | others


def test_parts_that_are_missing_or_do_not_fit(wan, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(wan.made("experts")[0], folder)
    shutil.rmtree(folder / "transformer_2")
    with pytest.raises(FileNotFoundError, match="has no folder 'transformer_2'"):
        calotype.load(folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "boundary_ratio": 3}))
    with pytest.raises(ValueError, match="boundary_ratio is 3; it must be a number from 0 to 1"):
        calotype.load(folder)
    shutil.copytree(wan.made("pictures")[0] / "transformer", folder / "transformer", dirs_exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps({**index, "boundary_ratio": None}))
    with pytest.raises(FileNotFoundError, match="has no folder 'image_encoder'"):
        calotype.load(folder)


@pytest.mark.parametrize("kind", ["experts", "first", "first and last"])
def test_a_folder_that_is_saved_is_the_same_model(wan, kind, tmp_path):
    import diffusers

    ours, _ = wan.both(kind)
    pictures = {"first": ["image"], "first and last": ["image", "last_image"]}.get(kind, [])
    told = {name: picture(16, 16, seed) for seed, name in enumerate(pictures)}
    told |= {"num_frames": 5, "num_inference_steps": 2, "seed": 3, "output_type": "latent", **SMALL}
    ours.save(tmp_path / "saved")
    again = calotype.load(tmp_path / "saved")
    assert again.family == ours.family
    assert torch.equal(again("a cat", **told).latents, ours("a cat", **told).latents)
    theirs = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "saved")
    assert type(theirs).__name__ == ("WanImageToVideoPipeline" if kind == "first and last" else "WanPipeline")
    assert (theirs.transformer_2 is None) == (kind != "experts")
    if kind == "experts":
        changed = dataclasses.replace(ours, denoiser=dataclasses.replace(ours.denoiser, boundary=0.3))
        with pytest.raises(ValueError, match="cannot save boundary"):
            changed.save(tmp_path / "changed")


@pytest.mark.parametrize("kind", ["text", "beside", "pictures"])
def test_a_file_of_the_denoiser(kind, tmp_path):
    """In Wan-AI's layout; other parts are given, and the scheduler is that for 480p."""
    sizes = {"num_attention_heads": 1, "attention_head_dim": 128, "eps": 1e-6}
    sizes |= {"added_kv_proj_dim": 128} if kind == "pictures" else {}
    theirs = wan_pipeline(tmp_path / "model", kind, scheduler=unipc(flow_shift=3.0), **sizes)
    index = json.loads((tmp_path / "model" / "model_index.json").read_text())
    (tmp_path / "model" / "model_index.json").write_text(json.dumps({**index, "boundary_ratio": None}))
    save_file(in_original_layout(theirs.transformer.state_dict()), tmp_path / "wan.safetensors")
    whole = calotype.load(tmp_path / "model")
    pipe = calotype.load(tmp_path / "wan.safetensors", encoders=tmp_path / "model", vae=tmp_path / "model")
    assert (pipe.family, pipe.recipe) == (whole.family, whole.recipe)
    told = {"num_frames": 5, "num_inference_steps": 2, "seed": 3, "output_type": "latent", **SMALL}
    told |= {} if kind == "text" else {"image": picture(16, 16)}
    assert torch.equal(pipe("a cat", **told).latents, whole("a cat", **told).latents)
    pipe.save(tmp_path / "saved")
    assert calotype.load(tmp_path / "saved").family == whole.family
    found = calotype.pipelines.inspection.inspect_model(tmp_path / "model")
    names = {component.name for component in found.components}
    assert names >= {"transformer", "vae", "text_encoder"} and found.missing == ()
    assert ("transformer_2" in names) == (kind == "beside")
    lacks = calotype.pipelines.inspection.inspect_model(tmp_path / "wan.safetensors").missing
    wanted = "the picture encoder (encoders=a folder in diffusers' layout that has one)"
    assert (wanted in lacks) == (kind == "pictures")


@pytest.mark.parametrize("kind", ["text", "first and last"])
def test_replay_of_clips_that_were_shown_something(wan, kind, tmp_path):
    """The very same clip or pictures are asked for; files stand for them."""
    ours, _ = wan.both(kind)
    told = {"num_inference_steps": 2, "seed": 3, **SMALL}
    if kind == "text":
        before, last = ours("a cat", num_frames=5, **told).save(tmp_path / "before.webp")[0], "video"
        other = ours("a boat", num_frames=5, **told).save(tmp_path / "other.webp")[0]
        given, swapped = {"video": before}, {"video": other}
        made = ours("a fox", strength=0.7, **told, **given)
    else:
        first, end = picture(16, 16), picture(16, 16, seed=1)
        end.save(tmp_path / "end.png")
        given, last = {"image": first, "last_image": tmp_path / "end.png"}, "last_image"
        swapped = {"image": first, "last_image": first}
        made = ours("a fox", num_frames=5, **told, **given)
    (path,) = made.save(tmp_path / "made.webp")
    again = calotype.replay(path, pipeline=ours, **given)
    assert again.bit_equal
    assert again.remarks == ()
    with pytest.raises(ValueError, match=f"this is not the {last} of that run"):
        calotype.replay(path, pipeline=ours, **swapped)
    with pytest.raises(ValueError, match=f"run needs its {last}"):
        calotype.replay(path, pipeline=ours, **{name: value for name, value in given.items() if name != last})


def test_a_copy_in_another_dtype(wan):
    ours, _ = wan.both("pictures")
    half = ours.to(dtype="bfloat16")
    told = {"image": picture(16, 16), "num_frames": 1, "num_inference_steps": 1, "output_type": "latent", **SMALL}
    assert half("a cat", seed=1, **told).latents.dtype is torch.float32
    assert half.looking.encoder.model.dtype is torch.bfloat16
    assert ours.looking.encoder.model.dtype is torch.float32
    two, _ = wan.both("experts")
    halves = two.to(dtype="bfloat16").denoiser
    assert {each.image_in.weight.dtype for each in (halves.high, halves.low)} == {torch.bfloat16}
    assert two.denoiser.low.image_in.weight.dtype is torch.float32
