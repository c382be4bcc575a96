"""FLUX.1 Kontext from a diffusers folder: every stage is diffusers' own."""

import dataclasses
import json
import sys

import numpy
import pytest
import torch
from parity import error, generators
from PIL import Image

import calotype
from calotype.denoisers.patches import unpatchify
from calotype.pipelines.compare import compare, first_divergence
from calotype.pipelines.compare_run import Run
from calotype.pipelines.families import family_of_folder
from calotype.pipelines.flux_kontext import SIZES, KontextEditing

from ..tiny_flux import flux_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

PROMPTS = ["a photo of a red fox", "two old dogs on the grass and a cat"]
SIZE = {"height": 24, "width": 40}
READ = ((24, 56), (40, 32), (32, 40), (56, 24))
"""Small sizes in place of the learnt ones."""
FEW = {"max_sequence_length": 9}


@pytest.fixture(scope="module")
def kontext(tmp_path_factory):
    """Ours, theirs, and our folder; 4 pixels a latent cell."""
    folder = tmp_path_factory.mktemp("kontext") / "model"
    theirs = flux_pipeline(True, folder, "FluxKontextPipeline")
    pipe = calotype.load(folder)
    assert pipe.editing == KontextEditing(multiple=8, made=(512, 512))
    return dataclasses.replace(pipe, editing=dataclasses.replace(pipe.editing, sizes=READ)), theirs, folder


def picture(width, height, seed=0):
    values = numpy.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=numpy.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)


def check(ours, theirs, mine, other, *, size=SIZE, pixels=True):
    """Latents of every step within 1e-5, pixels within 1e-4."""
    steps, area = [], {**size, "max_area": size["height"] * size["width"]}

    def keep(_, index, time, values):
        packed = values["latents"]
        shape = (len(packed), packed.shape[-1] // 4, 1, size["height"] // 4, size["width"] // 4)
        steps.append(unpatchify(packed.clone(), shape, 2))
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[type(theirs).__module__], "PREFERRED_KONTEXT_RESOLUTIONS", READ)
        expected = theirs(**other, **area, **FEW, output_type="np", callback_on_step_end=keep).images
    found = list(ours.stream(**mine, **size, **FEW, output_type="np"))
    assert len(found) == len(steps)
    for step, latents in zip(found, steps, strict=True):
        assert error(step.latents, latents) < 1e-5
    if pixels:
        assert numpy.abs(numpy.asarray(ours.decode(found[-1]).images) - expected).max() < 1e-4


@pytest.mark.parametrize(("width", "height"), [(70, 41), (20, 66)])
def test_editing(kontext, width, height):
    """One picture for two prompts, read at the size whose ratio is nearest."""
    ours, theirs, _ = kontext
    shared = {"prompt": PROMPTS, "image": picture(width, height), "num_inference_steps": 3, "guidance_scale": 2.7}
    check(ours, theirs, {**shared, "seed": [5, 9]}, {**shared, "generator": generators(5, 9)})


def test_without_a_picture(kontext):
    ours, theirs, _ = kontext
    shared = {"prompt": PROMPTS, "num_inference_steps": 2}
    check(ours, theirs, {**shared, "seed": [5, 9]}, {**shared, "generator": generators(5, 9)})


def test_classifier_free_guidance_sees_the_picture_on_both_sides(kontext):
    ours, theirs, _ = kontext
    shared = {"prompt": PROMPTS, "negative_prompt": ["a cat", ""], "true_cfg_scale": 2.5, "num_inference_steps": 2}
    shared["image"] = picture(33, 60)
    check(ours, theirs, {**shared, "seed": [1, 2]}, {**shared, "generator": generators(1, 2)})


@pytest.mark.parametrize("strength", [0.65, None])
def test_inpainting(kontext, strength):
    """It starts from the picture, and looks at it. Pixels outside are the picture's own here, not decoded."""
    from diffusers import FluxKontextInpaintPipeline

    ours, theirs, _ = kontext
    theirs = FluxKontextInpaintPipeline(**theirs.components)
    theirs.set_progress_bar_config(disable=True)
    start, mask = picture(40, 32), Image.new("L", (40, 32))
    mask.paste(255, (16, 8, 32, 24))
    shared = {"prompt": PROMPTS, "image": start, "mask_image": mask, "num_inference_steps": 4}
    shared |= {} if strength is None else {"strength": strength}
    size = {"height": 32, "width": 40}
    mine = {**shared, "seed": [3, 4]}
    check(ours, theirs, mine, {**shared, "generator": generators(3, 4)}, size=size, pixels=False)
    made = ours(**mine, **FEW, output_type="np").images
    outside = numpy.asarray(mask) == 0
    assert numpy.abs(made[:, outside] - numpy.asarray(start)[outside] / 255).max() < 1e-6


def test_rows_are_alone_and_replayed(kontext, tmp_path):
    """Each prompt with a picture of its own."""
    ours, _, _ = kontext
    pictures = [picture(40, 32), picture(40, 32, seed=1)]
    arguments = {"num_inference_steps": 2, **FEW, **SIZE}
    together = ours(PROMPTS, image=[[each] for each in pictures], seed=[7, 8], output_type="latent", **arguments)
    for row in range(2):
        alone = ours(PROMPTS[row], image=pictures[row], seed=7 + row, output_type="latent", **arguments).latents
        assert error(alone, together.latents[row : row + 1]) < 1e-5
    assert error(together.latents[:1], ours(PROMPTS[0], seed=7, output_type="latent", **arguments).latents) > 1e-3
    made = ours(PROMPTS[0], image=picture(70, 41), seed=3, **arguments)
    assert (made.manifest.task, made.warnings) == ("edit", ("image, picture 1: 70x41 is read at 40x32",))
    made.save(tmp_path / "edited.png")
    assert calotype.replay(tmp_path / "edited.png", image=picture(70, 41), pipeline=ours).bit_equal


def test_stage_by_stage(kontext, tmp_path, monkeypatch):
    """As `calotype diff` does it."""
    pipe, theirs, folder = kontext
    monkeypatch.setattr(sys.modules[type(theirs).__module__], "PREFERRED_KONTEXT_RESOLUTIONS", READ)
    short = {**pipe.encoders, "t5": pipe.encoders["t5"].with_max_tokens(24)}
    ours, layout = dataclasses.replace(pipe, encoders=short), family_of_folder(folder).layout
    images = (tmp_path / "a.png", tmp_path / "b.png")
    for seed, image in enumerate(images):
        picture(70, 41, seed).save(image)
    alone = Run(prompt="a photo of a red fox", num_inference_steps=2, seed=4, **SIZE)
    run = dataclasses.replace(alone, images=images[:1])
    told = ["token ids: clip", "token ids: t5", "embeddings: states", "embeddings: pooled"]
    steps = ["sigmas", "step 0", "step 1", "pixels"]
    for asked, names in ((run, [*told, "reference latents", *steps]), (alone, [*told, *steps])):
        found = compare(ours, theirs, layout, asked)
        assert [stage.name for stage in found] == names
        assert all(stage.difference < (1e-4 if stage.name == "pixels" else 1e-5) for stage in found)
    other = dataclasses.replace(ours, editing=dataclasses.replace(ours.editing, sizes=READ[2:]))
    assert first_divergence(compare(other, theirs, layout, run)).name == "reference latents"
    with pytest.raises(ValueError, match="2 pictures; this pipeline changes one"):
        compare(ours, theirs, layout, dataclasses.replace(alone, images=images))


def test_sizes():
    """The learnt ones, and what is made where no size is asked for, whatever the picture's."""
    from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

    assert list(SIZES) == PREFERRED_KONTEXT_RESOLUTIONS
    editing = KontextEditing(multiple=16, made=(1024, 768))
    assert editing.size([torch.zeros(3, 41, 70)]) == (1024, 768)
    for width, height in SIZES:
        assert tuple(editing.fitted(torch.zeros(3, height // 16, width // 16)).shape) == (3, height, width)


def test_saved_and_offloaded(kontext, tmp_path):
    ours, _, folder = kontext
    whole = calotype.load(folder)
    whole.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "model_index.json").read_text())["_class_name"] == "FluxKontextPipeline"
    lean = calotype.load(tmp_path / "saved", offload="blocks")
    assert lean.editing == whole.editing
    lean = dataclasses.replace(lean, editing=ours.editing)
    arguments = {"image": picture(40, 32), "num_inference_steps": 1, "seed": 1, "output_type": "latent", **FEW, **SIZE}
    assert torch.equal(lean("a cat", **arguments).latents, ours("a cat", **arguments).latents)


def test_mistakes(kontext):
    ours, _, _ = kontext
    arguments = {"num_inference_steps": 1, **FEW, **SIZE}
    with pytest.raises(ValueError, match="image holds 2 pictures for a prompt; this model looks at 1"):
        ours("a cat", image=[picture(40, 32)] * 2, **arguments)
    told = ours.encode(calotype.Request(prompt="a cat", image=picture(40, 32), **FEW, **SIZE)).conditioning
    several = dataclasses.replace(told.positive, references=told.positive.references * 2)
    with pytest.raises(ValueError, match="there are 2 references; this model looks at one picture"):
        ours(conditioning=dataclasses.replace(told, positive=several), **{**SIZE, "num_inference_steps": 1})
    odd = dataclasses.replace(told.positive, references=(told.positive.references[0][..., :-1],))
    with pytest.raises(ValueError, match="this model takes 4 channels, one frame, sides in steps of 2"):
        ours(conditioning=dataclasses.replace(told, positive=odd), **{**SIZE, "num_inference_steps": 1})
