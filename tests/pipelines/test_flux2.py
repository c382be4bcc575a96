"""FLUX.2 from diffusers folders: every stage is diffusers' own, with pictures to look at and without."""

import dataclasses
import json

import numpy
import pytest
import torch
from parity import error, generators
from PIL import Image
from safetensors.torch import save_file
from tiny_flux2 import flux2_pipeline, in_original_layout

import calotype
from calotype.denoisers.flux2_kv import Flux2KVDenoiser
from calotype.denoisers.guidance import ClassifierFree, Distilled, Unguided
from calotype.denoisers.patches import unpatchify
from calotype.pipelines.flux2 import Flux2Editing, recipe

PROMPTS = ["a photo of a red fox", "two old dogs on the grass and a cat"]
SIZE = {"height": 32, "width": 40}
LENGTH = {"max_sequence_length": 60}


def load(kind, tmp_path_factory):
    """Ours, and theirs."""
    folder = tmp_path_factory.mktemp("flux2") / "model"
    theirs = flux2_pipeline(kind, folder)
    return calotype.load(folder), theirs


@pytest.fixture(scope="module")
def dev(tmp_path_factory):
    return load("dev", tmp_path_factory)


@pytest.fixture(scope="module")
def klein(tmp_path_factory):
    return load("klein", tmp_path_factory)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return load("klein base", tmp_path_factory)


@pytest.fixture(scope="module")
def kv(tmp_path_factory):
    return load("klein kv", tmp_path_factory)


@pytest.fixture(params=["dev", "klein", "base"])
def both(request):
    return request.getfixturevalue(request.param)


def picture(width, height, seed=0):
    """Smooth, so that a wrong size shows in more than its last digits."""
    coarse = torch.rand(1, 3, 3, 4, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")[0]
    return Image.fromarray((smooth.permute(1, 2, 0) * 255).byte().numpy())


def reference(pipe, cells, **arguments):
    """Each step's latents and the pictures [N, H, W, 3] of a diffusers pipeline."""
    steps = []

    def keep(_, index, time, values):
        packed = values["latents"]
        steps.append(unpatchify(packed.clone(), (len(packed), packed.shape[-1], 1, *cells), 1))
        return values

    pictures = pipe(**arguments, output_type="np", callback_on_step_end=keep).images
    return steps, pictures


def check(pipes, mine, other, *, pixels=True):
    """Latents of every step within 1e-5, pixels within 1e-4."""
    ours, theirs = pipes
    found = list(ours.stream(**mine, **LENGTH, output_type="np"))
    cells = tuple(found[-1].latents.shape[3:])
    steps, pictures = reference(theirs, cells, **other, **LENGTH)
    assert len(found) == len(steps)
    for step, expected in zip(found, steps, strict=True):
        assert error(step.latents, expected) < 1e-5
    if pixels:
        assert numpy.abs(numpy.asarray(ours.decode(found[-1]).images) - pictures).max() < 1e-4


@pytest.mark.parametrize("size", [SIZE, {"height": 24, "width": 24}], ids=["40x32", "24x24"])
def test_text_to_image(both, size):
    shared = {"prompt": PROMPTS, "num_inference_steps": 3, "guidance_scale": 2.7, **size}
    check(both, {**shared, "seed": [5, 9]}, {**shared, "generator": generators(5, 9)})


@pytest.mark.parametrize("count", [1, 2])
def test_editing(both, count):
    """One picture, or two, for all rows; the first gives the size, cropped to whole cells. The second is wider."""
    pictures = [picture(70, 64), picture(104, 72, 1)][:count]
    shared = {"prompt": PROMPTS, "image": pictures, "num_inference_steps": 2, "guidance_scale": 2.2}
    check(both, {**shared, "seed": [1, 2]}, {**shared, "generator": generators(1, 2)})
    ours, _ = both
    result = ours(**{**shared, "prompt": "a cat", "seed": 1}, **LENGTH)
    assert result.images[0].size == (64, 64)
    assert result.manifest.task == "edit"
    assert "image, picture 1: 70x64 is read at 64x64" in result.warnings


@pytest.mark.parametrize("count", [0, 1, 2])
def test_klein_kv_remembers_its_pictures(kv, count):
    """Their keys and values, which depend on neither the text nor the step."""
    pictures = [picture(70, 64), picture(104, 72, 1)][:count]
    shared = {"prompt": PROMPTS, "image": pictures or None, "num_inference_steps": 3, **SIZE}
    check(kv, {**shared, "seed": [1, 2]}, {**shared, "generator": generators(1, 2)})


def test_klein_kv_alone_guided_and_from_files(kv, tmp_path):
    """A row is that row alone, both sides of guidance see the pictures, blocks may stay in their files."""
    ours, _ = kv
    assert isinstance(ours.denoiser, Flux2KVDenoiser) and ours.recipe == recipe("klein", downsampling=8)
    lists = [[picture(64, 64)], [picture(64, 64, 1)]]
    arguments = {"num_inference_steps": 2, "output_type": "latent", **LENGTH, **SIZE}
    together = ours(PROMPTS, image=lists, seed=[1, 2], **arguments).latents
    for row in range(2):
        alone = ours(PROMPTS[row], image=lists[row], seed=1 + row, **arguments).latents
        assert error(together[row : row + 1], alone) < 1e-5
    guided = {**arguments, "image": lists[0], "negative_prompt": "a boat and a cat", "seed": 1}
    both = [ours("a cat", guidance=ClassifierFree(2.0, batched=batched), **guided).latents for batched in (True, False)]
    assert error(*both) < 1e-5
    ours.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "model_index.json").read_text())["_class_name"] == "Flux2KleinKVPipeline"
    lean = calotype.load(tmp_path / "saved", offload="blocks")
    assert torch.equal(lean(PROMPTS, image=lists, seed=[1, 2], **arguments).latents, together)


def test_editing_at_another_size(dev):
    shared = {"prompt": "a cat", "image": picture(72, 80), "num_inference_steps": 2, **SIZE}
    check(dev, {**shared, "seed": 4}, {**shared, "generator": generators(4)})


def test_conditioning_and_schedule(both):
    ours, theirs = both
    encoded = ours.encode(calotype.Request(prompt=PROMPTS, num_inference_steps=4, **LENGTH, **SIZE))
    states, _ = theirs.encode_prompt(PROMPTS, None, **LENGTH)
    assert error(encoded.conditioning.positive.states, states) < 1e-5
    theirs(prompt=PROMPTS[0], num_inference_steps=4, output_type="latent", **LENGTH, **SIZE)
    assert encoded.plan.schedule.sigmas == pytest.approx(theirs.scheduler.sigmas.tolist(), abs=1e-6)


def test_classifier_free_guidance_on_klein_base(base):
    """diffusers has no negative prompt but takes its states."""
    ours, theirs = base
    negative = ["a boat", ""]
    shared = {"prompt": PROMPTS, "guidance_scale": 2.5, "num_inference_steps": 2, "image": picture(64, 64), **SIZE}
    states, _ = theirs.encode_prompt(negative, None, **LENGTH)
    mine = {**shared, "negative_prompt": negative, "seed": [1, 2]}
    check(base, mine, {**shared, "negative_prompt_embeds": states, "generator": generators(1, 2)})
    arguments = {"num_inference_steps": 1, "output_type": "latent", "seed": 1, **LENGTH, **SIZE}
    plain = ours("a cat", guidance_scale=1.0, **arguments).latents
    assert torch.equal(plain, ours("a cat", guidance=Unguided(), **arguments).latents)
    assert not torch.equal(plain, ours("a cat", **arguments).latents)


@pytest.mark.parametrize(("strength", "pictures"), [(0.7, 1), (1.0, 2)])
def test_inpainting(base, strength, pictures):
    """It starts from the first picture and looks at all. Pixels outside are the picture's own here, not decoded."""
    from diffusers import Flux2KleinInpaintPipeline

    ours, theirs = base
    theirs = Flux2KleinInpaintPipeline(**theirs.components)
    theirs.set_progress_bar_config(disable=True)
    mask = Image.new("L", (72, 64))
    mask.paste(255, (16, 8, 48, 40))
    start, other = picture(72, 64), picture(64, 80, 2)
    shared = {"prompt": PROMPTS, "mask_image": mask, "strength": strength, "num_inference_steps": 4}
    shared["guidance_scale"] = 1.8
    mine = {**shared, "image": [start, other][:pictures], "seed": [3, 4]}
    their = {**shared, "image": start, "image_reference": other if pictures == 2 else None}
    check((ours, theirs), mine, {**their, "generator": generators(3, 4), "height": 64, "width": 72}, pixels=False)
    made = ours(**{**mine, "output_type": "np"}, **LENGTH).images
    outside = numpy.asarray(mask) == 0
    assert numpy.abs(made[:, outside] - numpy.asarray(start)[outside] / 255).max() < 1e-6


def test_strength(dev):
    """1 is editing; 0 is the round trip."""
    ours, _ = dev
    start = picture(64, 72)
    arguments = {"image": start, "num_inference_steps": 2, "output_type": "latent", "seed": 2, **LENGTH}
    edited = ours("a cat", **arguments)
    assert error(ours("a cat", strength=1.0, **arguments).latents, edited.latents) < 1e-5
    kept = ours("a cat", strength=0, **arguments)
    pixels = torch.from_numpy(numpy.asarray(start) / 255).permute(2, 0, 1)[None, :, None].float()
    assert torch.allclose(kept.latents, ours.vae.encode(pixels * 2 - 1), atol=1e-6)
    assert (edited.manifest.task, kept.manifest.task) == ("edit", "image-to-image")


def test_each_prompt_with_its_own_pictures_and_their_replay(base, tmp_path):
    """Rows are alone, whatever the others look at, and the file of one of them is enough to make it again."""
    ours, _ = base
    lists = [[picture(64, 64, n), picture(72, 64, n + 4)] for n in (1, 2)]
    arguments = {"num_inference_steps": 2, "guidance_scale": 2.0, **LENGTH}
    made = ours(PROMPTS, image=lists, num_images_per_prompt=2, seed=3, **arguments)
    for row in range(4):
        alone = ours(PROMPTS[row // 2], image=lists[row // 2], seed=3 + row, **arguments)
        assert error(alone.latents, made.latents[row : row + 1]) < 1e-5
    made.save(tmp_path / "made.png")
    again = calotype.replay(tmp_path / "made-3.png", image=lists)
    assert again.bit_equal
    assert again.remarks == ()
    with pytest.raises(ValueError, match="this is not the image of that run"):
        calotype.replay(tmp_path / "made-3.png", image=lists[0])


def test_one_picture_each_is_not_two_pictures_for_all(dev):
    ours, _ = dev
    first, second = picture(64, 64, 1), picture(64, 64, 2)
    arguments = {"num_inference_steps": 1, "output_type": "latent", "seed": 1, **LENGTH}
    each = ours(PROMPTS, image=[[first], [second]], **arguments)
    shared = ours(PROMPTS, image=[first, second], **arguments)
    assert error(shared.latents, each.latents) > 1e-3
    assert each.manifest.inputs["image"] != shared.manifest.inputs["image"]
    assert (
        ours("a", image=[[first]], **arguments).manifest.inputs == ours("a", image=first, **arguments).manifest.inputs
    )


@pytest.mark.parametrize("size", [(1500, 1000), (1024, 1024), (90, 700), (1400, 1431)])
def test_pictures_are_read_in_the_size_of_diffusers(size):
    from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor

    processor, given = Flux2ImageProcessor(vae_scale_factor=16), picture(*size)
    image = processor._resize_to_target_area(given) if size[0] * size[1] > 1024**2 else given
    width, height = (side // 16 * 16 for side in image.size)
    expected = processor.preprocess(image, height=height, width=width, resize_mode="crop")[0]
    unit = torch.from_numpy(numpy.asarray(given) / 255).permute(2, 0, 1).float()
    found = Flux2Editing(multiple=16).fitted(unit)
    assert torch.allclose(found * 2 - 1, expected, atol=1e-6)


def test_conditioning_stands_for_prompt_and_pictures(base):
    ours, _ = base
    shared = {"num_inference_steps": 1, "guidance_scale": 2.0, **SIZE}
    encoded = ours.encode(calotype.Request(prompt=PROMPTS, image=picture(64, 64), **LENGTH, **shared))
    told, arguments = encoded.conditioning, {"output_type": "latent", "seed": 4, **shared}
    whole = ours(PROMPTS, image=picture(64, 64), **LENGTH, **arguments).latents
    assert torch.equal(whole, ours(conditioning=told, **arguments).latents)
    bare, far = (dataclasses.replace(part, references=()) for part in (told.positive, told.negative))
    unseeing = dataclasses.replace(told, positive=bare, negative=far)
    assert not torch.equal(whole, ours(conditioning=unseeing, **arguments).latents)
    assert torch.equal(whole, ours(conditioning=unseeing, image=picture(64, 64), **arguments).latents)
    with pytest.raises(ValueError, match="conditioning already holds the pictures to look at"):
        ours(conditioning=told, image=picture(64, 64), **arguments)
    padded = dataclasses.replace(bare, lengths=bare.lengths - 1)
    with pytest.raises(ValueError, match="states without padding"):
        ours(conditioning=padded, **arguments)


def test_a_run_resumes_bit_equal(dev):
    ours, _ = dev
    request = calotype.Request(prompt=PROMPTS, image=picture(64, 64), num_inference_steps=3, seed=1, **LENGTH)
    encoded = ours.encode(request)
    steps = list(ours.denoise(encoded))
    again = list(ours.denoise(encoded, resume=steps[0].state))
    assert torch.equal(again[-1].latents, steps[-1].latents)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"height": 20}, "height is 20; it must be a multiple of 8, such as 16 or 24"),
        ({"prompt_2": "a"}, "prompt_2: flux2 does not use this argument"),
        ({"max_sequence_length": 513}, "max_sequence_length is 513; it must be from 2 to 512"),
        ({"guidance": Distilled(None)}, "this model is told a value"),
        ({"image": picture(60, 80)}, "picture 1: is 60x80; both sides must be at least 64 pixels"),
        ({"image": [picture(64, 64), picture(600, 64)]}, "picture 2: is 600x64; one side may be 8 times the other"),
        ({"image": [picture(64, 64), [picture(64, 64)]]}, "it takes either, not both"),
        ({"image": [[picture(64, 64)]] * 3}, "image holds 3 lists of pictures for 2 prompts"),
        ({"image": [[picture(64, 64)], [picture(64, 72)]]}, "read at 64x64 and 64x72; all prompts of a call"),
        ({"image": [[picture(64, 64)], [picture(64, 64)] * 2]}, "read at 64x64 and 64x64, 64x64; all prompts"),
        ({"image": []}, "an empty list of pictures"),
        ({"image": picture(70, 64), "strength": 0.5}, "image's width is 70; it must be a multiple of 8"),
    ],
)
def test_mistakes(dev, arguments, message):
    ours, _ = dev
    with pytest.raises(ValueError, match=message):
        ours(PROMPTS, **{"num_inference_steps": 1, **arguments})


def test_models_that_look_at_nothing_refuse_references(dev):
    ours, _ = dev
    blind = dataclasses.replace(ours, editing=None)
    told = ours.encode(
        calotype.Request(prompt="a", image=picture(64, 64), num_inference_steps=1, **LENGTH)
    ).conditioning
    with pytest.raises(ValueError, match="this model looks at no pictures"):
        blind(conditioning=told)


def test_recipes_and_what_contradicts_them(klein, base, dev):
    assert [recipe(kind).num_inference_steps for kind in ("dev", "klein", "klein base")] == [50, 4, 50]
    assert (recipe("dev").width, recipe("dev").size_multiple) == (1024, 16)
    arguments = {"num_inference_steps": 1, "output_type": "latent", **LENGTH, **SIZE}
    assert any(
        "guidance_scale 4.0 has no effect" in line for line in klein[0]("a", guidance_scale=4.0, **arguments).warnings
    )
    assert any("it begins above 1" in line for line in base[0]("a", guidance_scale=0.5, **arguments).warnings)
    assert dev[0]("a", guidance_scale=0.5, **arguments).warnings == ()
    named = dev[0]("a", negative_prompt="b", **arguments).warnings
    assert any("negative_prompt has no effect" in line for line in named)


def test_a_guidance_object_is_told_the_value(dev):
    ours, _ = dev
    encoded = ours.encode(
        calotype.Request(prompt="a", guidance=ClassifierFree(2.0), num_inference_steps=1, **LENGTH, **SIZE)
    )
    assert encoded.plan.guidance == Distilled(4.0, then=ClassifierFree(2.0))


@pytest.mark.parametrize(("name", "kind"), [("klein-4b", "klein"), ("klein-base-4b", "klein base")])
def test_single_files(klein, tmp_path, name, kind):
    """Black Forest Labs' file of the denoiser, with the other parts of a folder, is the folder with that denoiser."""
    from diffusers import Flux2Transformer2DModel

    ours, theirs = klein
    settings = {**theirs.transformer.config, "axes_dims_rope": (4, 4, 4, 4), "rope_theta": 2000, "eps": 1e-6}
    transformer = Flux2Transformer2DModel.from_config(settings)
    transformer.load_state_dict(theirs.transformer.state_dict())
    transformer.save_pretrained(tmp_path / "transformer")
    save_file(in_original_layout(transformer.state_dict()), tmp_path / f"{name}.safetensors")
    folder = ours.source.name
    whole = calotype.load(folder, denoiser=tmp_path / "transformer")
    single = calotype.load(tmp_path / f"{name}.safetensors", encoders=folder, vae=folder)
    assert (whole.family.kind, single.family.kind) == ("klein", kind)
    arguments = {"num_inference_steps": 1, "guidance": Unguided(), "output_type": "latent", "seed": 1, **LENGTH, **SIZE}
    assert torch.equal(whole("a cat", **arguments).latents, single("a cat", **arguments).latents)


def test_parts_that_do_not_fit(klein, tmp_path):
    _, theirs = klein
    theirs.save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "transformer" / "config.json"
    entries = json.loads(config.read_text())
    config.write_text(json.dumps(entries | {"joint_attention_dim": 99}))
    with pytest.raises(ValueError, match="gives states of 96 at 3 layers; the transformer needs 99"):
        calotype.load(tmp_path / "model")
    config.write_text(json.dumps(entries))
    (tmp_path / "model" / "vae").rename(tmp_path / "model" / "elsewhere")
    with pytest.raises(FileNotFoundError, match="no folder 'vae'"):
        calotype.load(tmp_path / "model")
