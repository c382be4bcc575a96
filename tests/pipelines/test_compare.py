"""A run against diffusers', stage by stage."""

import copy
import dataclasses
import importlib
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import calotype
from calotype.denoisers.patches import patchify
from calotype.encoders.base import LimitedEncoder
from calotype.pipelines import families
from calotype.pipelines.compare import (
    Stage,
    arguments_of,
    compare,
    compare_folder,
    difference,
    differences,
    first_divergence,
    trace_ours,
    trace_theirs,
)
from calotype.pipelines.compare_adapters import adapter_of
from calotype.pipelines.compare_run import Run
from calotype.pipelines.discrete import DiscreteScheduler

from ..tiny_families import FAMILIES, SIZE, SIZES
from ..tiny_flux2 import flux2_pipeline
from ..tiny_hunyuan_video import HunyuanVideoPipelines
from ..tiny_ltx_pipeline import LTXPipelines
from ..tiny_qwen_image import qwen_image_edit_pipeline
from ..tiny_sd import SCHEDULERS, sd_pipeline, sdxl_pipeline
from .sd_parity import ours_with, theirs_as

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

HEIGHT, WIDTH = SIZE
RUN = Run(prompt="a photo of a red fox", width=WIDTH, height=HEIGHT, num_inference_steps=2, seed=4)


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """Our pipeline, and the stages of diffusers'."""
    folder = tmp_path_factory.mktemp("compare") / "flux"
    theirs = FAMILIES["flux"](folder)
    ours = shortened(calotype.load(folder))
    return ours, trace_theirs(theirs, families.family_of_folder(folder).layout, RUN, asked(ours))


def asked(ours):
    return arguments_of(ours, adapter_of("FluxPipeline"), RUN)


def shortened(ours):
    """Encoders whose length can be set read few tokens."""
    encoders = {
        role: encoder.with_max_tokens(24) if isinstance(encoder, LimitedEncoder) else encoder
        for role, encoder in ours.encoders.items()
    }
    return dataclasses.replace(ours, encoders=encoders)


def stages(ours, theirs):
    return differences(trace_ours(ours, adapter_of("FluxPipeline"), RUN, asked(ours)), theirs)


def test_every_stage_is_the_same(flux):
    found = stages(*flux)
    assert [stage.name for stage in found] == [
        *("token ids: clip", "token ids: t5", "embeddings: states", "embeddings: pooled", "sigmas"),
        *("step 0", "step 1", "pixels"),
    ]
    assert all(stage.difference < (1e-4 if stage.name == "pixels" else 1e-5) for stage in found)
    assert first_divergence(found) is None


def altered(part):
    """A copy whose last matrix is another."""
    other = copy.deepcopy(part)
    last = [parameter for parameter in other.parameters() if parameter.ndim > 1 and not parameter.is_meta][-1]
    with torch.no_grad():
        last[0, 0] += 0.5
    return other


def with_encoder(ours, role):
    encoder = ours.encoders[role]
    return dataclasses.replace(
        ours, encoders={**ours.encoders, role: dataclasses.replace(encoder, model=altered(encoder.model))}
    )


def with_vae(ours):
    return dataclasses.replace(ours, vae=dataclasses.replace(ours.vae, module=altered(ours.vae.module)))


def with_scheduler(ours):
    scheduler = dataclasses.replace(ours.family.scheduler, base_shift=0.6)
    return dataclasses.replace(ours, family=dataclasses.replace(ours.family, scheduler=scheduler))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda ours: with_encoder(ours, "t5"), "embeddings: states"),
        (lambda ours: with_encoder(ours, "clip"), "embeddings: pooled"),
        (with_scheduler, "sigmas"),
        (lambda ours: dataclasses.replace(ours, denoiser=altered(ours.denoiser)), "step 0"),
        (with_vae, "pixels"),
    ],
)
def test_an_altered_weight_is_found_at_its_stage(flux, change, where):
    ours, theirs = flux
    found = first_divergence(stages(change(ours), theirs), 1e-5)
    assert found is not None
    assert found.name == where
    assert 1e-5 < found.difference < 10


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "flux"])
def test_other_families(name, tmp_path):
    theirs = FAMILIES[name](tmp_path / "model")
    height, width = SIZES.get(name, SIZE)
    run = dataclasses.replace(RUN, height=height, width=width)
    layout = families.family_of_folder(tmp_path / "model").layout
    found = compare(shortened(calotype.load(tmp_path / "model")), theirs, layout, run)
    assert {"embeddings: states", "sigmas", "step 1", "pixels"} <= {stage.name for stage in found}
    assert any(stage.name.startswith("token ids") for stage in found)
    assert first_divergence(found) is None, found


def same(found):
    """Every stage within the tolerances of the parity tests."""
    assert all(stage.difference < (1e-4 if stage.name == "pixels" else 1e-5) for stage in found), found
    return [stage.name for stage in found]


@pytest.fixture(scope="module")
def sd(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare") / "sd"
    theirs = sd_pipeline(folder)
    return calotype.load(folder), theirs, families.family_of_folder(folder).layout


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare") / "sdxl"
    theirs = sdxl_pipeline(folder)
    return calotype.load(folder), theirs, families.family_of_folder(folder).layout


@pytest.mark.parametrize(
    ("family", "name"), [*(("sd", name) for name in SCHEDULERS), ("sdxl", "euler"), ("sdxl", "ddim")]
)
def test_models_that_predict_noise(family, name, request):
    """Latents are compared after they are on one path; PNDM's first step takes two calls."""
    ours, theirs, layout = request.getfixturevalue(family)
    others = {"sd": {"requires_safety_checker": False}, "sdxl": {"add_watermarker": False}}[family]
    both = ours_with(ours, name), theirs_as(theirs, type(theirs), name, **others)
    run = dataclasses.replace(RUN, width=56, height=40, num_inference_steps=3)
    told = {
        "sd": ("token ids: clip", "embeddings: states"),
        "sdxl": (
            *("token ids: clip_2", "token ids: clip"),
            *("embeddings: states", "embeddings: pooled", "embeddings: time_ids"),
        ),
    }
    names = (*told[family], "timesteps", "sigmas", "step 0", "step 1", "step 2", "pixels")
    assert same(compare(*both, layout, run)) == list(names)


def test_a_folder_of_a_model_that_predicts_noise(sdxl):
    folder = Path(sdxl[0].source.name)
    assert same(compare_folder(folder, dataclasses.replace(RUN, width=40, height=40)))[-1] == "pixels"


def test_a_refiner_starts_from_a_picture(tmp_path):
    theirs = sdxl_pipeline(tmp_path / "refiner", refiner=True)
    ours, layout = calotype.load(tmp_path / "refiner"), families.family_of_folder(tmp_path / "refiner").layout
    run = Run(prompt="a cat", num_inference_steps=4, seed=2, images=(drawn(tmp_path / "a.png", 56, 40),))
    assert same(compare(ours, theirs, layout, run))[-3:] == ["sigmas", "step 0", "pixels"]
    for wrong in (dataclasses.replace(run, images=()), dataclasses.replace(run, width=56)):
        with pytest.raises(ValueError, match="this pipeline starts from one, whose size it keeps"):
            compare(ours, theirs, layout, wrong)


def drawn(path, width, height):
    """A file with a picture."""
    values = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(width))
    Image.fromarray(values.to(torch.uint8).numpy()).save(path)
    return path


@pytest.mark.parametrize(("kind", "steps"), [("klein", 1), ("klein kv", 2)])
def test_flux2_looks_at_pictures(kind, steps, tmp_path):
    """KV's second step reads what its first one has left of the pictures."""
    theirs = flux2_pipeline(kind, tmp_path / "model")
    ours, layout = shortened(calotype.load(tmp_path / "model")), families.family_of_folder(tmp_path / "model").layout
    images = tuple(drawn(tmp_path / f"{n}.png", 64 + 8 * n, 70) for n in range(2))
    run = Run(prompt="a cat", num_inference_steps=steps, seed=2, images=images)
    seen = ["token ids: llm", "embeddings: states", "reference latents"]
    names = [*seen, "sigmas", *(f"step {n}" for n in range(steps)), "pixels"]
    assert same(compare(ours, theirs, layout, run)) == names
    cropped = dataclasses.replace(ours, editing=dataclasses.replace(ours.editing, multiple=24))
    assert first_divergence(compare(cropped, theirs, layout, run)).name == "reference latents"


def test_flux2_klein_kv_from_its_folder(tmp_path):
    """Of a prompt alone; a change is found at its stage."""
    theirs = flux2_pipeline("klein kv", tmp_path / "model")
    run = dataclasses.replace(RUN, width=48, height=32)
    names = ["token ids: llm", "embeddings: states", "sigmas", "step 0", "step 1", "pixels"]
    assert same(compare_folder(tmp_path / "model", run)) == names
    ours, layout = calotype.load(tmp_path / "model"), families.family_of_folder(tmp_path / "model").layout
    other = dataclasses.replace(ours, denoiser=altered(ours.denoiser))
    assert first_divergence(compare(other, theirs, layout, run), 1e-5).name == "step 0"


def test_qwen_image_edit_looks_at_pictures(tmp_path, monkeypatch):
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as module

    monkeypatch.setattr(module, "CONDITION_IMAGE_SIZE", 60**2)
    monkeypatch.setattr(module, "VAE_IMAGE_SIZE", 50**2)
    theirs = qwen_image_edit_pipeline(tmp_path / "model", zero_cond_t=True)
    pipe, layout = calotype.load(tmp_path / "model"), families.family_of_folder(tmp_path / "model").layout
    ours = dataclasses.replace(pipe, editing=dataclasses.replace(pipe.editing, seen=60**2, read=50**2))
    images = drawn(tmp_path / "a.png", 70, 41), drawn(tmp_path / "b.png", 33, 60)
    run = dataclasses.replace(RUN, images=images)
    names = ["token ids: llm", "embeddings: states", "reference latents", "sigmas", "step 0", "step 1", "pixels"]
    assert same(compare(ours, theirs, layout, run)) == names
    smaller = dataclasses.replace(ours, editing=dataclasses.replace(ours.editing, seen=40**2))
    assert first_divergence(compare(smaller, theirs, layout, run)).name == "token ids: llm"
    with pytest.raises(ValueError, match="asks for one or more to look at"):
        compare(ours, theirs, layout, RUN)


def test_the_first_qwen_image_edit_looks_at_one(tmp_path, monkeypatch):
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as module

    sides = module.calculate_dimensions
    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: sides(50**2, ratio))
    theirs = qwen_image_edit_pipeline(tmp_path / "model", "QwenImageEditPipeline")
    pipe, layout = calotype.load(tmp_path / "model"), families.family_of_folder(tmp_path / "model").layout
    ours = dataclasses.replace(pipe, editing=dataclasses.replace(pipe.editing, seen=50**2, read=50**2))
    images = drawn(tmp_path / "a.png", 70, 41), drawn(tmp_path / "b.png", 33, 60)
    names = ["token ids: llm", "embeddings: states", "reference latents", "sigmas", "step 0", "step 1", "pixels"]
    assert same(compare(ours, theirs, layout, dataclasses.replace(RUN, images=images[:1]))) == names
    with pytest.raises(ValueError, match="2 pictures; this pipeline changes one"):
        compare(ours, theirs, layout, dataclasses.replace(RUN, images=images))


@pytest.mark.parametrize("kind", ["text", "experts", "pictures", "first and last", "beside", "first"])
def test_clips(wan, kind, tmp_path, monkeypatch):
    """Of the prompt alone, and of pictures that they begin and end with; of a first picture also where one model makes
    clips with and without (diffusers has another class for it)."""
    ours, theirs = wan.both(kind)
    for name in ("pipeline_wan", "pipeline_wan_i2v"):
        module = importlib.import_module(f"diffusers.pipelines.wan.{name}")
        monkeypatch.setattr(module, "ftfy", SimpleNamespace(fix_text=str), raising=False)
    layout, count = families.family_of_folder(wan.made(kind)[0]).layout, {"text": 0, "experts": 0, "first and last": 2}
    side = 32 if kind == "first" else 16
    images = tuple(drawn(tmp_path / f"{n}.png", side, side) for n in range(count.get(kind, 1)))
    run = Run(prompt="a fox", width=side, height=side, num_inference_steps=3, num_frames=5, seed=4, images=images)
    looked_at = {"pictures": ["embeddings: picture_states"], "first and last": ["embeddings: picture_states"]}
    told = ["token ids: t5", "embeddings: states", *looked_at.get(kind, ()), *(["latents beside"] if images else ())]
    assert same(compare(ours, theirs, layout, run)) == [*told, "sigmas", "step 0", "step 1", "step 2", "pixels"]
    if kind in ("text", "pictures"):
        other = dataclasses.replace(ours, denoiser=altered(ours.denoiser))
        assert first_divergence(compare(other, theirs, layout, run), 1e-5).name == "step 0"
    if kind == "first":
        assert "latents beside" not in same(compare(ours, theirs, layout, dataclasses.replace(run, images=())))
        wrong, message = dataclasses.replace(run, images=images * 2), "2 pictures; this pipeline makes clips that begin"
    else:
        wrong = dataclasses.replace(run, images=() if images else (tmp_path / "a.png",))
        message = "0 pictures; this pipeline makes clips that begin" if images else "alone"
    with pytest.raises(ValueError, match=message):
        compare(ours, theirs, layout, wrong)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Tiny pipelines of further families, with what their folders' layout is."""
    root = tmp_path_factory.mktemp("clips")
    made = {"hunyuan": HunyuanVideoPipelines(root / "hunyuan"), "ltx": LTXPipelines(root / "ltx")}

    def of(family, kind):
        ours, theirs = made[family].both(kind)
        return ours, theirs, families.family_of_folder(made[family].folder(kind)).layout

    return of


@pytest.mark.parametrize("kind", ["text", "pictures", "meanflow"])
def test_clips_of_hunyuan_video(clips, kind, tmp_path):
    """With and without texts in quotes; a clip that begins with a picture has its aspect."""
    ours, theirs, layout = clips("hunyuan", kind)
    begins = kind != "text"
    images = (drawn(tmp_path / "0.png", 30, 19),) if begins else ()
    size = {} if begins else {"width": 32, "height": 16}
    run = Run(prompt='a sign "old dogs"', num_inference_steps=2, num_frames=5, seed=4, images=images, **size)
    told = ["token ids: llm", "token ids: byt5", "embeddings: states", "embeddings: other_states"]
    seen = ["embeddings: picture_states", "latents beside"] if begins else []
    assert same(compare(ours, theirs, layout, run)) == [*told, *seen, "sigmas", "step 0", "step 1", "pixels"]
    plain = same(compare(ours, theirs, layout, dataclasses.replace(run, prompt="a fox", num_frames=1)))
    assert plain == [told[0], told[2], *seen, "sigmas", "step 0", "step 1", "pixels"]
    other = dataclasses.replace(ours, denoiser=altered(ours.denoiser))
    assert first_divergence(compare(other, theirs, layout, run), 1e-5).name == "step 0"
    assert "step" not in vars(theirs.scheduler)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("kind", ["plain", "timed", "later"])
def test_clips_of_ltx_video(clips, kind, begins, tmp_path):
    """Steps are compared without the first frame where ours goes to it; diffusers has another class for it."""
    ours, theirs, layout = clips("ltx", kind)
    images = (drawn(tmp_path / "0.png", 40, 32),) if begins else ()
    run = Run(prompt="a red fox", width=64, height=32, num_inference_steps=2, num_frames=9, seed=4, images=images)
    seen = ["latents beside"] if begins and kind != "later" else []
    names = ["token ids: t5", "embeddings: states", *seen, "sigmas", "step 0", "step 1", "pixels"]
    assert same(compare(ours, theirs, layout, run)) == names
    other = dataclasses.replace(ours, denoiser=altered(ours.denoiser))
    assert first_divergence(compare(other, theirs, layout, run), 1e-5).name == "step 0"
    if seen:
        one = same(compare(ours, theirs, layout, dataclasses.replace(run, num_frames=1)))
        assert one == [*names[:4], "pixels"]  # nothing but the picture
    distilled = dataclasses.replace(ours, family=dataclasses.replace(ours.family, distilled=True))
    assert same(compare(distilled, theirs, layout, dataclasses.replace(run, num_inference_steps=8)))[-1] == "pixels"


@pytest.mark.parametrize(
    ("family", "kind", "changes", "message"),
    [
        ("hunyuan", "text", {"images": 1}, "of prompts alone"),
        ("hunyuan", "pictures", {}, "0 pictures; this pipeline makes clips that begin with one, which gives the size"),
        ("hunyuan", "pictures", {"images": 1, "width": 32}, "which gives the size"),
        ("hunyuan", "text", {"num_frames": 6}, "the clip has 6 frames; it must have 1 more than a multiple of 4"),
        ("ltx", "plain", {"images": 2}, "2 pictures; this pipeline makes clips that begin with one"),
        ("ltx", "later", {"images": 2}, "2 pictures; this pipeline makes clips that begin with one"),
    ],
)
def test_clips_that_cannot_be_compared(clips, family, kind, changes, message, tmp_path):
    ours, theirs, layout = clips(family, kind)
    images = tuple(tmp_path / f"{n}.png" for n in range(changes.get("images", 0)))
    run = dataclasses.replace(Run(prompt="a fox", num_inference_steps=1, num_frames=5), **{**changes, "images": images})
    with pytest.raises(ValueError, match=message):
        compare(ours, theirs, layout, run)


def test_frames_of_a_model_that_makes_pictures(flux):
    with pytest.raises(ValueError, match="num_frames is 5; this pipeline of flux makes pictures"):
        arguments_of(flux[0], adapter_of("FluxPipeline"), dataclasses.replace(RUN, num_frames=5))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda ours: with_encoder(ours, "clip_2"), "embeddings: pooled"),
        (lambda ours: with_spacing(ours, "trailing"), "timesteps"),
        (lambda ours: dataclasses.replace(ours, denoiser=altered(ours.denoiser)), "step 0"),
        (with_vae, "pixels"),
    ],
)
def test_an_altered_part_of_sdxl_is_found_at_its_stage(sdxl, change, where):
    ours, theirs, layout = sdxl
    found = first_divergence(compare(change(ours), theirs, layout, dataclasses.replace(RUN, width=40, height=40)), 1e-5)
    assert found is not None
    assert found.name == where
    assert found.difference < 10


def with_spacing(ours, spacing):
    kind, options = SCHEDULERS["euler"]
    scheduler = DiscreteScheduler.from_entries({"_class_name": kind, **options, "timestep_spacing": spacing})
    return dataclasses.replace(ours, family=dataclasses.replace(ours.family, scheduler=scheduler))


def test_stages_of_several_shapes():
    ids = torch.tensor([[5, 6, 7]])
    assert difference("token ids: t5", ids, torch.tensor([[5, 6, 7, 0, 0]])) == Stage(
        name="token ids: t5", difference=0
    )
    assert difference("token ids: t5", ids, torch.tensor([[5, 9, 7, 0, 0]])).difference == pytest.approx(1 / 3)
    longer = difference("token ids: t5", ids, torch.tensor([[5, 6, 7, 8, 9]]))
    assert (longer.difference, longer.note) == (math.inf, "[1, 3] here, [1, 5] in diffusers")
    x = torch.randn(2, 3, 1, 4, 6)
    for other in (x, x[:, :, 0], patchify(x, 1), patchify(x, 2)):
        assert difference("step 0", x, other).difference == 0
    assert difference("step 0", x, patchify(x, 2)[:, :-1]).difference == math.inf
    assert difference("step 0", x, None).diverges(1e9)
    assert difference("step 0", torch.full_like(x, math.nan), x).diverges(1e9)


def test_what_cannot_be_compared(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no model_index\.json"):
        compare_folder(tmp_path, RUN)
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxImg2ImgPipeline"}')
    with pytest.raises(ValueError, match="a FluxImg2ImgPipeline cannot be compared; what can is FluxPipeline, "):
        compare_folder(tmp_path, RUN)


def test_pictures_for_a_model_that_takes_none(flux):
    ours, _ = flux
    run = dataclasses.replace(RUN, images=(Path("fox.png"),))
    with pytest.raises(ValueError, match=r"fox\.png: this pipeline of flux makes pictures of prompts alone"):
        arguments_of(ours, adapter_of("FluxPipeline"), run)
