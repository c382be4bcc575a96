"""HunyuanVideo 1.5 from diffusers folders: every stage is diffusers' own, from text and from pictures."""

import dataclasses
import json
import shutil
from unittest import mock

import numpy
import pytest
import torch
from clip_pipelines import (
    check_any_number_of_frames,
    check_cancelling_decodes_nothing,
    check_exactly_the_frames_that_are_asked_for,
    check_stages_compose_and_resume,
)
from parity import error, generators
from safetensors.torch import save_file

import calotype
from calotype.denoisers.guidance import ClassifierFree, Distilled
from calotype.pipelines.finite import NonFiniteError
from calotype.pipelines.hunyuan_guider import Guider
from calotype.pipelines.hunyuan_pictures import closest_size, covering
from calotype.pipelines.manifest import Manifest

from ..fake_hub import Hub
from ..tiny_hunyuan_video import (
    SIZES,
    HunyuanVideoPipelines,
    glyph_tokenizer,
    hunyuan_video_pipeline,
    in_comfy_layout,
    in_original_layout,
)
from ..tiny_text_encoders import t5_model
from ..tiny_wan_pipeline import picture

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

PROMPTS = ['a photo of a red fox and a sign "old dogs"', "two dogs on the grass"]
SMALL = {"height": 16, "width": 16}
WIDE = {"height": 16, "width": 32}


@pytest.fixture(scope="module")
def hunyuan(tmp_path_factory):
    return HunyuanVideoPipelines(tmp_path_factory.mktemp("hunyuan"))


@pytest.fixture(scope="module")
def ours(hunyuan):
    return hunyuan.both("text")[0]


def reference(pipe, **arguments):
    """Each step's latents and the clips [N, F, H, W, 3] of a diffusers pipeline, which has no callback."""
    steps, step = [], pipe.scheduler.step

    def keep(*given, **options):
        steps.append(step(*given, **options)[0])
        return (steps[-1],)

    with mock.patch.object(pipe.scheduler, "step", keep):
        return steps, pipe(**arguments, output_type="np").frames


def compare(both, seeds, arguments, theirs_alone=None):
    """A run of each."""
    ours, theirs = both
    told = {name: value for name, value in arguments.items() if not name.startswith("guidance")}
    steps, clips = reference(theirs, **{**told, **(theirs_alone or {})}, generator=generators(*seeds))
    found = list(ours.stream(**arguments, seed=list(seeds), output_type="np"))
    assert len(found) == len(steps)
    for step, expected in zip(found, steps, strict=True):
        assert error(step.latents, expected) < 1e-5
    result = ours.decode(found[-1])
    assert result.videos.shape == clips.shape
    assert numpy.abs(result.videos - clips).max() < 1e-4
    return result


@pytest.mark.parametrize(
    ("frames", "size", "told"),
    [
        (1, WIDE, {}),
        (5, SMALL, {"negative_prompt": ['a boat and "a cat"', ""]}),
        (9, WIDE, {"negative_prompt": ["a cat", "a cat"]}),
        (17, SMALL, {}),
    ],
)
def test_text_to_video(hunyuan, frames, size, told):
    """The guider's scale is the default, with an empty negative prompt; one of two prompts is in quotes."""
    told = {"prompt": PROMPTS, "num_frames": frames, "num_inference_steps": 3, **size, **told}
    result = compare(hunyuan.both("text"), (5, 9), told)
    assert result.fps == 24
    assert result.warnings == ()
    assert result.manifest.guidance["scale"] == 6.0


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5])
def test_scales(hunyuan, scale):
    """Any but 1 guides."""
    ours, theirs = hunyuan.both("text")
    told = {"prompt": PROMPTS[:1], "num_frames": 1, "num_inference_steps": 2, **SMALL}
    with mock.patch.object(theirs, "guider", theirs.guider.new(guidance_scale=scale, guidance_rescale=0.3)):
        compare((ours, theirs), (4,), {**told, "guidance_scale": scale, "guidance_rescale": 0.3})


def test_a_distilled_model(hunyuan):
    """It says so by its guider's scale."""
    ours, _ = hunyuan.both("distilled")
    told = {"prompt": PROMPTS, "num_frames": 5, "num_inference_steps": 2, **SMALL}
    compare(hunyuan.both("distilled"), (5, 9), told)
    assert ours.recipe.guidance_scale == 1.0
    guided = ours(PROMPTS[0], guidance_scale=3.0, num_frames=1, num_inference_steps=1, output_type="latent", **SMALL)
    assert guided.warnings == ("guidance_scale 3.0: this model was made to run without guidance, at 1",)


def test_conditioning_and_schedule(hunyuan):
    ours, theirs = hunyuan.both("text")
    encoded = ours.encode(calotype.Request(prompt=PROMPTS, num_inference_steps=4, num_frames=5, **SMALL))
    for side, prompts in ((encoded.conditioning.positive, PROMPTS), (encoded.conditioning.negative, ["", ""])):
        states, mask, glyphs, glyph_mask = theirs.encode_prompt(prompts, device="cpu", batch_size=2)
        for found, lengths, expected, there in (
            (side.states, side.lengths, states, mask),
            (side.other_states, side.other_lengths, glyphs, glyph_mask),
        ):
            assert lengths.tolist() == there.sum(dim=1).tolist()
            for row, length in enumerate(lengths):
                if length:
                    assert error(found[row : row + 1, :length], expected[row : row + 1, :length]) < 1e-5
    theirs(PROMPTS[0], num_inference_steps=4, num_frames=1, output_type="latent", **SMALL)
    points = encoded.plan.schedule.points
    assert [point.sigma for point in points] == theirs.scheduler.sigmas.tolist()


@pytest.mark.parametrize("steps", [1, 7, 50])
def test_sigmas(hunyuan, steps):
    ours, theirs = hunyuan.both("text")
    theirs.scheduler.set_timesteps(sigmas=numpy.linspace(1.0, 0.0, steps + 1)[:-1])
    told = {"prompt": "a cat", "num_frames": 1, "num_inference_steps": steps}
    plan = ours.encode(calotype.Request(**told, **SMALL)).plan
    assert [point.sigma for point in plan.schedule.points] == theirs.scheduler.sigmas.tolist()
    given = [0.9, 0.4, 0.1]
    theirs.scheduler.set_timesteps(sigmas=given)
    plan = ours.encode(calotype.Request(prompt="a cat", num_frames=1, sigmas=given, **SMALL)).plan
    assert [point.sigma for point in plan.schedule.points] == theirs.scheduler.sigmas.tolist()


@pytest.mark.parametrize(("frames", "size"), [(5, (30, 19)), (1, (24, 24)), (9, (16, 40)), (17, (30, 19))])
def test_image_to_video(hunyuan, frames, size):
    """The clip has the picture's aspect, as far as it can."""
    both = hunyuan.both("pictures")
    told = {"prompt": PROMPTS, "negative_prompt": ["a cat", ""], "num_frames": frames, "num_inference_steps": 3}
    result = compare(both, (5, 9), {**told, "image": picture(*size)})
    assert result.manifest.task == "image-to-video"


@pytest.mark.parametrize("steps", [1, 4])
def test_a_model_that_is_told_where_steps_lead(hunyuan, steps):
    ours, theirs = hunyuan.both("meanflow")
    assert theirs.transformer.config.use_meanflow and ours.family.meanflow
    told = {"prompt": PROMPTS[:1], "num_frames": 5, "num_inference_steps": steps, "image": picture(30, 19)}
    compare((ours, theirs), (5,), told)
    with pytest.raises(ValueError, match="it guides all or none"):
        ours(PROMPTS[0], image=picture(8, 8), guidance=ClassifierFree(2.0, interval=(0.2, 1.0)))


def test_sizes_are_those_of_diffusers():
    from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

    theirs = HunyuanVideo15ImageProcessor(vae_scale_factor=16)
    sides = ((1, 1), (640, 480), (333, 777), (1920, 1080), (5, 100), (100, 5), (997, 1000), (4, 1), (1, 4))
    for target in (640, 960):
        for width, height in sides:
            expected = theirs.calculate_default_height_width(height, width, target)
            assert closest_size(width, height, target, 16) == tuple(reversed(expected))
    assert closest_size(16, 9, 640, 16) == (848, 480)
    assert closest_size(16, 9, 960, 16) == (1280, 720)


@pytest.mark.parametrize("size", [(30, 19), (19, 30), (32, 16), (64, 16), (100, 101)])
def test_pictures_are_cropped_as_diffusers_does(size):
    from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

    given = picture(*size)
    pixels = torch.from_numpy(numpy.array(given)).permute(2, 0, 1).float() / 255
    for width, height in ((32, 16), (16, 16), (16, 48)):
        expected = HunyuanVideo15ImageProcessor().resize(given, height=height, width=width, resize_mode="crop")
        found = (covering(pixels, width, height) * 255).round().to(torch.uint8).permute(1, 2, 0)
        assert numpy.array_equal(found.numpy(), numpy.array(expected))


def test_a_picture_and_a_size(hunyuan):
    ours, _ = hunyuan.both("pictures")
    told = {"num_frames": 1, "num_inference_steps": 1, "output_type": "np", "seed": 1}
    assert ours("a cat", image=picture(30, 19), **told, **WIDE).videos.shape == (1, 1, 16, 32, 3)
    with pytest.raises(ValueError, match=r"ask for clips of .* and .*; give a width and a height"):
        ours(PROMPTS, image=[picture(30, 19), picture(19, 30)], **{**told, "seed": [1, 2]})
    two = ours(PROMPTS, image=[picture(30, 19), picture(19, 30)], **{**told, "seed": [1, 2]}, **WIDE)
    alone = ours(PROMPTS[1], image=picture(19, 30), **{**told, "seed": 2}, **WIDE)
    assert error(alone.latents, two.latents[1:]) < 1e-5


def test_exactly_the_frames_that_are_asked_for(ours):
    told = {"prompt": PROMPTS[0], "num_inference_steps": 1, "seed": 3, **SMALL}
    check_exactly_the_frames_that_are_asked_for(ours, told, asked=7, made=9)


@pytest.mark.parametrize("frames", range(1, 41))
def test_any_number_of_frames(ours, frames):
    check_any_number_of_frames(ours, SMALL, frames)


def test_rows_are_alone(ours):
    """Two clips for each prompt, which diffusers cannot make."""
    told = {"num_frames": 5, "num_inference_steps": 2, "output_type": "latent", **SMALL}
    negative = ['"a sign"', "a boat and the river"]
    together = ours(PROMPTS, negative_prompt=negative, num_videos_per_prompt=2, seed=7, **told).latents
    for row in range(4):
        alone = ours(PROMPTS[row // 2], negative_prompt=negative[row // 2], seed=7 + row, **told).latents
        assert error(alone, together[row : row + 1]) < 1e-5


def test_stages_compose_and_resume(ours):
    told = {"num_frames": 5, "num_inference_steps": 3, "seed": 1, **SMALL}
    whole, conditioning = check_stages_compose_and_resume(ours, {"prompt": PROMPTS, **told})
    lacking = dataclasses.replace(conditioning.positive, other_states=None, other_lengths=None)
    with pytest.raises(ValueError, match="also reads other_states"):
        ours(conditioning=lacking, **told)
    streamed = numpy.concatenate(list(ours.stream_frames(PROMPTS, output_type="np", **told)), axis=1)
    assert numpy.abs(streamed - whole.videos).max() < 1e-6


def test_cancelling_and_what_is_not_finite(ours, monkeypatch):
    told = {"num_frames": 1, "num_inference_steps": 3, "seed": 0, **SMALL}
    broken = torch.nn.Linear(48, 32)
    broken.weight.data.fill_(torch.nan)
    block = ours.denoiser.blocks[1].x.mlp
    with mock.patch.object(block, "down", broken), pytest.raises(NonFiniteError, match="block 1 of 2"):
        ours(PROMPTS[0], **told)
    check_cancelling_decodes_nothing(ours, {"prompt": PROMPTS[0], **told}, monkeypatch)


def test_the_manifest_says_it_all(ours):
    told = {"num_frames": 3, "num_inference_steps": 2, "max_sequence_length": 40, "guidance_rescale": 0.2, **SMALL}
    first = ours(PROMPTS[0], negative_prompt="a cat", seed=3, **told)
    manifest = Manifest.from_json(first.manifest.to_json())
    assert manifest.extra == {"num_frames": 3, "max_sequence_length": 40}
    assert (manifest.task, manifest.guidance["rescale"]) == ("text-to-video", 0.2)
    from calotype.pipelines.replay import Arguments

    again = Arguments.of(manifest, image=None, mask_image=None).run(ours, progress=False)
    assert torch.equal(again.latents, first.latents)


@pytest.mark.parametrize("kind", ["text", "pictures"])
def test_weights_may_stay_in_their_files(hunyuan, kind):
    ours, _ = hunyuan.both(kind)
    given = {"image": picture(16, 16)} if kind == "pictures" else {}
    told = {"num_frames": 5, "num_inference_steps": 2, "seed": 3, "output_type": "latent", **SMALL, **given}
    expected = ours(PROMPTS[0], **told).latents
    for offload in ("encoders", "blocks"):
        lean = calotype.load(hunyuan.folder(kind), offload=offload)
        assert torch.equal(lean(PROMPTS[0], **told).latents, expected)
    assert all(parameter.is_meta for parameter in lean.denoiser.blocks.parameters())
    assert all(parameter.is_meta for parameter in lean.encoders["byt5"].t5.model.parameters())


@pytest.mark.parametrize("kind", ["text", "pictures"])
def test_a_folder_that_is_saved_is_the_same_model(hunyuan, kind, tmp_path):
    import diffusers

    ours, theirs = hunyuan.both(kind)
    told = {"image": picture(16, 16)} if kind == "pictures" else {}
    told |= {"num_frames": 5, "num_inference_steps": 2, "seed": 3, "output_type": "latent", **SMALL}
    ours.save(tmp_path / "saved")
    again = calotype.load(tmp_path / "saved")
    assert (again.family, again.recipe) == (ours.family, ours.recipe)
    assert torch.equal(again("a cat", **told).latents, ours("a cat", **told).latents)
    index = json.loads((tmp_path / "saved" / "model_index.json").read_text())
    assert index["guider"] == ["diffusers", "ClassifierFreeGuidance"]
    assert index["tokenizer_2"] == ["transformers", "ByT5Tokenizer"]
    if kind == "text":
        loaded = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "saved")
        assert type(loaded) is type(theirs) and loaded.guider.guidance_scale == 6.0
    changed = dataclasses.replace(ours, family=dataclasses.replace(ours.family, guider=Guider(scale=2.0)))
    with pytest.raises(ValueError, match="cannot save family"):
        changed.save(tmp_path / "changed")


@pytest.mark.parametrize(
    ("kind", "layout"), [("text", in_original_layout), ("pictures", in_original_layout), ("text", in_comfy_layout)]
)
def test_a_file_of_the_denoiser(kind, layout, tmp_path):
    """In Tencent's layout or ComfyUI's; other parts are given, and the scheduler and the scale are those for 480p."""
    sizes = {"num_attention_heads": 1, "attention_head_dim": 128, "rope_axes_dim": (16, 56, 56), "rope_theta": 256.0}
    theirs = hunyuan_video_pipeline(tmp_path / "model", kind, **sizes, target_size=640)
    save_file(layout(theirs.transformer.state_dict()), tmp_path / "hunyuan.safetensors")
    whole = calotype.load(tmp_path / "model")
    file = calotype.load(tmp_path / "hunyuan.safetensors", encoders=tmp_path / "model", vae=tmp_path / "model")
    scheduler = dataclasses.replace(whole.family.scheduler, shift=5.0)
    assert file.family == dataclasses.replace(whole.family, scheduler=scheduler)
    assert file.recipe == whole.recipe
    told = {"num_frames": 5, "num_inference_steps": 2, "seed": 3, "output_type": "latent", **SMALL}
    told |= {} if kind == "text" else {"image": picture(16, 16)}
    same = dataclasses.replace(whole, family=file.family)
    assert torch.equal(file("a cat", **told).latents, same("a cat", **told).latents)
    file.save(tmp_path / "saved")
    again = calotype.load(tmp_path / "saved")
    assert again.family == file.family and type(again.looking) is type(whole.looking)


def test_the_second_text_encoder_in_a_file(hunyuan, tmp_path):
    """As ComfyUI has it, with its tokenizer in a folder; what shapes do not show is as published."""
    published = {"relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6}
    theirs = t5_model(vocab_size=384, d_model=SIZES["text_embed_2_dim"], **published)
    hunyuan.both("text")
    folder, file = hunyuan.folder("text"), tmp_path / "byt5.safetensors"
    save_file({name: x for name, x in theirs.state_dict().items() if "embed_tokens" not in name}, file)
    pipe = calotype.load(folder, encoders={"byt5": file}, tokenizers={"byt5": folder / "tokenizer_2"})
    ids = glyph_tokenizer()('Text "old dogs". ', return_tensors="pt").input_ids
    found = pipe.encoders["byt5"](PROMPTS)
    assert found.lengths.tolist() == [ids.shape[1], 0]
    assert error(found.states[:1], theirs(ids).last_hidden_state) < 1e-5


def test_only_what_a_repository_has_is_downloaded(hunyuan, monkeypatch):
    names = {"text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer", "vae", "scheduler", "guider"}
    for kind, others in (("text", set()), ("pictures", {"image_encoder", "feature_extractor"})):
        hunyuan.both(kind)
        folder = hunyuan.folder(kind)
        found = {
            path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()
        }
        hub = Hub(monkeypatch, folder, found)
        calotype.load("owner/name")
        assert {name.split("/")[0] for name in hub.asked[-1]["allow_patterns"] if "/" in name} == names | others


def test_parts_that_are_missing_or_do_not_fit(hunyuan, tmp_path):
    hunyuan.both("pictures")
    folder = tmp_path / "model"
    shutil.copytree(hunyuan.folder("pictures"), folder)
    shutil.rmtree(folder / "image_encoder")
    with pytest.raises(FileNotFoundError, match="has no folder 'image_encoder'"):
        calotype.load(folder)
    shutil.rmtree(folder / "guider")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "HunyuanVideo15Pipeline"}))
    pipe = calotype.load(folder)
    assert pipe.recipe.guidance_scale == 6.0 and not pipe.family.begins
    entries = json.loads((folder / "text_encoder_2" / "config.json").read_text())
    (folder / "text_encoder_2" / "config.json").write_text(json.dumps({**entries, "d_model": 24}))
    with pytest.raises(ValueError, match="has d_model 24; the transformer needs 20"):
        calotype.load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "AdaptiveProjectedGuidance"}, "_class_name is 'AdaptiveProjectedGuidance'"),
        ({"start": 0.2}, "start is 0.2; only guiders where it is 0"),
        ({"stop": 0.8}, "stop is 0.8; only guiders where it is 1"),
        ({"use_original_formulation": True}, "use_original_formulation is True"),
        ({"guidance_rescale": 2.0}, "it must be from 0 to 1"),
        ({"guidance_scale": "6"}, "guidance_scale is '6'; it must be a number"),
        ({"momentum": 1}, "momentum is 1; known entries are"),
    ],
)
def test_guiders_of_other_kinds_are_refused(changes, message):
    usual = {"_class_name": "ClassifierFreeGuidance", "_diffusers_version": "0.42.1", "guidance_scale": 5.0}
    assert Guider.from_entries(usual) == Guider(scale=5.0)
    assert Guider.from_entries({**usual, "enabled": False}) == Guider(scale=1.0)
    assert Guider.from_entries(Guider(scale=3.0, rescale=0.5).entries()) == Guider(scale=3.0, rescale=0.5)
    with pytest.raises(ValueError, match=message):
        Guider.from_entries({**usual, **changes})


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("text", {"height": 18}, "height is 18; it must be a multiple of 4, such as 16 or 20"),
        ("text", {"num_frames": 0}, "num_frames is 0; it must be from 1 to 1000"),
        ("text", {"image": picture(8, 8)}, "image: hunyuan_video does not use this argument"),
        ("text", {"guidance": Distilled(3.0)}, "this model is told no value"),
        ("text", {"max_sequence_length": 1001}, "max_sequence_length is 1001; it must be from 2 to 1000"),
        ("text", {"strength": 0.5}, "strength: hunyuan_video does not use this argument"),
        ("pictures", {}, "image is not given; this model makes clips that begin with one"),
        ("pictures", {"image": picture(8, 8), "last_image": picture(8, 8)}, "last_image: hunyuan_video does not use"),
        ("pictures", {"image": [picture(8, 8)] * 3}, "image holds 3 pictures for 1 prompts"),
    ],
)
def test_mistakes(hunyuan, kind, arguments, message):
    ours, _ = hunyuan.both(kind)
    with pytest.raises(ValueError, match=message):
        ours("a cat", **{**WIDE, "num_frames": 5, "num_inference_steps": 1, **arguments})


def test_a_copy_in_another_dtype(hunyuan):
    ours, _ = hunyuan.both("pictures")
    half = ours.to(dtype="bfloat16")
    told = {"image": picture(16, 16), "num_frames": 1, "num_inference_steps": 1, "output_type": "latent", **SMALL}
    assert half(PROMPTS[0], seed=1, **told).latents.dtype is torch.float32
    assert half.looking.encoder.model.dtype is torch.bfloat16
    assert half.encoders["byt5"].t5.model.dtype is torch.bfloat16
    assert ours.looking.encoder.model.dtype is torch.float32


def test_the_command_line(hunyuan, tmp_path, capsys):
    from calotype.cli import main

    hunyuan.both("text")
    target = tmp_path / "fox.webp"
    options = ["--frames", "3", "--steps", "1", "--size", "16x16", "--seed", "4", "-o", str(target)]
    assert main(["video", PROMPTS[0], "--model", str(hunyuan.folder("text")), *options]) == 0
    assert "fox.webp  (seed 4" in capsys.readouterr().out
    assert calotype.read_clip(target).frames.shape == (3, 16, 16, 3)
