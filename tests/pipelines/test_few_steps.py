"""Distilled UNets: told by the names of their files or by their schedulers, and run as their model cards say."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from parity import generators

import calotype
from calotype.denoisers.guidance import Unguided
from calotype.pipelines.few_steps import few_steps
from calotype.pipelines.recipe import Recipe
from calotype.schedulers import DiscreteConfig

from .. import tiny_unet
from ..tiny_sd import SCHEDULERS, sdxl_pipeline
from .sd_parity import IGNORED, PICTURE, SIZE, check

pytestmark = pytest.mark.filterwarnings(*IGNORED)
NAMES = {
    "sd_xl_turbo_1.0_fp16.safetensors": ("SDXL Turbo", 4, None),
    "sd_xl_turbo_1.0.safetensors": ("SDXL Turbo", 4, None),
    "sd_turbo.safetensors": ("SD Turbo", 4, None),
    "sdxl_lightning_1step_unet_x0.safetensors": ("SDXL Lightning", 1, None),
    "sdxl_lightning_2step.safetensors": ("SDXL Lightning", 2, None),
    "sdxl_lightning_4step_unet.safetensors": ("SDXL Lightning", 4, None),
    "sdxl_lightning_8step_unet.safetensors": ("SDXL Lightning", 8, None),
    "Hyper-SDXL-1step-Unet.safetensors": ("Hyper-SDXL", 1, (800,)),
    "dmd2_sdxl_4step_unet_fp16.safetensors": ("DMD2", 4, (999, 749, 499, 249)),
}
WIDE = {
    **tiny_unet.SDXL,
    "block_out_channels": (64, 64, 64),  # what a file's shapes can tell: heads of 64
    "layers_per_block": 1,
    "norm_num_groups": 32,
    "attention_head_dim": (1, 1, 1),
    "transformer_layers_per_block": (1, 1, 1),
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 6 * 256 + 24,
}
LIGHTNING = {"timestep_spacing": "trailing"}
FILES = {
    "sdxl_lightning_2step_unet.safetensors": ("EulerDiscreteScheduler", LIGHTNING, {"num_inference_steps": 2}),
    "sdxl_lightning_1step_unet_x0.safetensors": (
        *("EulerDiscreteScheduler", {**LIGHTNING, "prediction_type": "sample"}),
        {"num_inference_steps": 1},
    ),
    "Hyper-SDXL-1step-Unet.safetensors": ("LCMScheduler", {}, {"timesteps": [800]}),
    "dmd2_sdxl_4step_unet.safetensors": ("LCMScheduler", {}, {"timesteps": [999, 749, 499, 249]}),
    "sd_xl_turbo_1.0_fp16.safetensors": ("EulerAncestralDiscreteScheduler", LIGHTNING, {"num_inference_steps": 4}),
}
"""As the model cards have diffusers run them, over SDXL base's scheduler."""


def config(name="EulerDiscreteScheduler", **options):
    return DiscreteConfig.from_entries({"_class_name": name, "timestep_spacing": "trailing", **options})


@pytest.mark.parametrize("name", NAMES)
def test_files_are_known_by_their_published_names(name):
    found = few_steps(Path("models") / name, config("PNDMScheduler", skip_prk_steps=True))
    assert (found.title, found.num_inference_steps, found.timesteps) == NAMES[name]


@pytest.mark.parametrize(
    "name", ["sd_xl_base_1.0.safetensors", "dreamshaperXL_turbo.safetensors", "my_sdxl_lightning_4step.safetensors"]
)
def test_other_files_are_not(name):
    assert few_steps(Path(name), config()) is None


def test_folders_are_known_by_their_scheduler(tmp_path):
    folder = tmp_path / "sdxl_lightning_4step_unet"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert few_steps(folder, config()) == few_steps(folder, config("EulerAncestralDiscreteScheduler"))
    assert few_steps(folder, config()).num_inference_steps == 4
    others = (
        config(timestep_spacing="leading"),
        config(prediction_type="v_prediction"),
        config(rescale_betas_zero_snr=True),
        config("DPMSolverMultistepScheduler"),
    )
    assert [few_steps(folder, each) for each in others] == [None] * 4


def test_latent_consistency_models_are_told_a_value(tmp_path):
    found = few_steps(tmp_path, config("LCMScheduler"), told=True)
    made = found.recipe(Recipe(), 8)
    assert (made.num_inference_steps, made.guidance_scale, made.strength) == (4, 8.5, 0.8)
    assert found.warnings(calotype.Request(prompt="a", guidance_scale=7.0, num_inference_steps=4)) == ()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base model's folder, and diffusers' pipeline with another UNet."""
    folder = tmp_path_factory.mktemp("few") / "base"
    theirs = sdxl_pipeline(folder)
    theirs.register_modules(unet=tiny_unet.unet(WIDE, seed=7))
    theirs.unet.save_pretrained(folder.with_name("unet"))
    return folder, theirs


def in_a_file(folder, name):
    path = folder.with_name(name)
    if not path.exists():
        shutil.copy(folder.with_name("unet") / "diffusion_pytorch_model.safetensors", path)
    return path


@pytest.mark.parametrize("name", FILES)
def test_a_file_in_a_base_models_folder(base, name):
    """It is run as its model card says, where nothing else is asked for."""
    import diffusers

    folder, theirs = base
    kind, options, asked = FILES[name]
    ours = calotype.load(folder, denoiser=in_a_file(folder, name))
    leading = {**SCHEDULERS["euler"][1], "timestep_spacing": "leading"}
    theirs.register_modules(scheduler=getattr(diffusers, kind).from_config({**leading, **options}))
    shared = {"prompt": ["a photo of a red fox", "a boat"], **SIZE}
    other = {**shared, **asked, "guidance_scale": 0.0, "generator": generators(5, 9)}
    check(ours, theirs, {**shared, "seed": [5, 9]}, other)


@pytest.fixture(scope="module")
def turbo(base):
    """A folder with Turbo's scheduler."""
    folder = base[0].with_name("turbo")
    shutil.copytree(base[0], folder)
    kind, options = SCHEDULERS["euler_ancestral"]
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**options, "_class_name": kind}))
    return calotype.load(folder)


def test_a_folder_has_a_distilled_models_defaults(turbo):
    assert (turbo.recipe.num_inference_steps, turbo.recipe.guidance_scale, turbo.recipe.strength) == (4, 0.0, 0.5)
    arguments = {"seed": 1, "output_type": "latent", **SIZE}
    made = turbo("a cat", **arguments)
    assert made.warnings == ()
    assert made.manifest.times[:-1] == (999, 749, 499, 249)
    assert torch.equal(made.latents, turbo("a cat", guidance=Unguided(), num_inference_steps=4, **arguments).latents)
    late = turbo("a cat", image=PICTURE, seed=1, output_type="latent")
    assert len(late.timings) - len(made.timings) == -2  # half of the steps


def test_what_contradicts_the_recipe_is_done_with_a_warning(turbo, base):
    arguments = {"seed": 1, "output_type": "latent", **SIZE}
    guided = turbo("a cat", guidance_scale=7.0, negative_prompt="a dog", num_inference_steps=1, **arguments)
    (line,) = guided.warnings
    assert line.startswith("guidance_scale 7.0: this model (distilled, by its scheduler) was made to run without")
    assert guided.manifest.guidance["scale"] == 7.0
    (line,) = turbo("a cat", negative_prompt="a dog", num_inference_steps=1, **arguments).warnings
    assert line == "negative_prompt has no effect: this guidance makes no unconditional pass"
    lightning = calotype.load(base[0], denoiser=in_a_file(base[0], "sdxl_lightning_2step_unet.safetensors"))
    (line,) = lightning("a cat", num_inference_steps=3, **arguments).warnings
    assert line == "num_inference_steps 3: this model (SDXL Lightning) was made for 2"


def test_turbo_files_make_small_pictures(base):
    """Their shapes are XL's, whose pictures are twice as wide."""
    turbo = calotype.load(base[0], denoiser=in_a_file(base[0], "sd_xl_turbo_1.0_fp16.safetensors"))
    lightning = calotype.load(base[0], denoiser=in_a_file(base[0], "sdxl_lightning_2step_unet.safetensors"))
    assert (turbo.recipe.width, turbo.recipe.height) == (512, 512)
    assert (lightning.recipe.width, lightning.recipe.height) == (1024, 1024)


@pytest.mark.parametrize("name", ["dmd2_sdxl_4step_unet_fp16.safetensors", "sd_xl_turbo_1.0_fp16.safetensors"])
def test_saved_as_a_folder_they_are_still_known(base, tmp_path, name):
    pipe = calotype.load(base[0], denoiser=in_a_file(base[0], name))
    pipe.save(tmp_path / "saved")
    again = calotype.load(tmp_path / "saved")
    assert (again.recipe, again.family.guide) == (pipe.recipe, pipe.family.guide)
    assert again.family.guide.few is not None
    arguments = {"seed": 1, "output_type": "latent", **SIZE}
    assert torch.equal(again("a cat", **arguments).latents, pipe("a cat", **arguments).latents)
