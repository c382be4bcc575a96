"""Recipes, progress, placement."""

import time
from dataclasses import dataclass, replace

import pytest
import torch
from fakes import fake_pipeline
from torch import nn

from calotype.core.copies import moved
from calotype.pipelines.base import last
from calotype.pipelines.image import ImagePipeline
from calotype.pipelines.placement import device_named, dtype_named
from calotype.pipelines.progress import Progress
from calotype.pipelines.recipe import Recipe
from calotype.vae.preview import LatentPreview

CPU = torch.device("cpu")


def test_recipe_from_config():
    recipe = Recipe.from_config({"width": 64, "guidance_scale": 2, "sampler": "heun"})
    assert recipe == Recipe(width=64, guidance_scale=2.0, sampler="heun")
    assert isinstance(recipe.guidance_scale, float)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"widht": 64}, "unknown entries widht; known are width"),
        ({"width": "64"}, "recipe's width is '64'; it must be of type int"),
        ({"width": True}, "recipe's width is True"),
        ({"sampler": 3}, "recipe's sampler is 3; it must be of type str"),
        ({"sampler": "warp"}, "recipe's sampler is 'warp'; it must be one of euler, heun"),
        ({"size_multiple": 0}, "recipe's size_multiple is 0; it must be at least 1"),
        ({"num_inference_steps": 0}, "recipe's num_inference_steps is 0; it must be at least 1"),
        ({"strength": 1.5}, "recipe's strength is 1.5; it must be from 0 to 1"),
        ({"width": 100}, "recipe's width is 100; it must be a multiple of 16, such as 96 or 112"),
        ({"height": 1024}, "recipe's height is 1024; it must be from 32 to 512"),
    ],
)
def test_a_wrong_recipe(entries: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        Recipe.from_config(entries)


def test_no_bar_on_quick_runs(capsys: pytest.CaptureFixture[str]):
    fake_pipeline()("a")
    assert capsys.readouterr().err == ""


def test_a_bar_on_slow_runs(capsys: pytest.CaptureFixture[str]):
    with Progress(enabled=True, delay=-1.0) as bar:
        for done in (1, 2, 3):
            bar.update(done, 3)
            time.sleep(0.11)
    assert "2/3" in capsys.readouterr().err
    with Progress(enabled=False, delay=-1.0) as bar:
        bar.update(1, 3)
    assert capsys.readouterr().err == ""


@dataclass(frozen=True, kw_only=True)
class Holder:
    module: nn.Module
    names: tuple[str, ...] = ("a",)


def model() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    module[1].weight = nn.Parameter(torch.ones(3, 4))
    module.register_buffer("count", torch.tensor(3))
    module.register_buffer("shared", module[0].weight.detach())
    return module


def test_moved_copies_and_leaves_the_original():
    module = model()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    copied = moved(module, CPU, torch.bfloat16)
    assert {str(p.dtype) for p in copied.parameters()} == {"torch.bfloat16"}
    assert copied.state_dict()["count"].dtype is torch.int64
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert type(copied) is type(module) and copied is not module


def test_moved_shares_what_need_not_change():
    module = model()
    copied = moved(module, CPU, torch.float32)
    assert copied[0].weight.data_ptr() == module[0].weight.data_ptr()  # type: ignore[index, union-attr]


def test_moved_looks_into_dataclasses_only():
    holder = Holder(module=model())
    assert next(moved(holder, CPU, torch.float16).module.parameters()).dtype is torch.float16
    names = ("a", 1)
    assert moved(names, CPU, torch.float16) is names
    assert moved(torch.ones(1), CPU, torch.float16).dtype is torch.float16


def test_names_of_dtypes_and_devices():
    assert dtype_named("bfloat16") is dtype_named(torch.bfloat16) is torch.bfloat16
    with pytest.raises(ValueError, match="dtype is int8; it must be one of float32, bfloat16, float16"):
        dtype_named("int8")
    assert device_named("cpu") == CPU
    for name in ("toaster", "cuda:99"):
        with pytest.raises(ValueError, match=f"device is '{name}'"):
            device_named(name)


def test_preview():
    weight = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 0, 5.0]])
    projection = LatentPreview(weight=weight, bias=torch.tensor([0.0, 0.5, 0.0]))
    latents = torch.full((2, 4, 1, 3, 5), 0.25)
    pixels = projection(latents)
    assert pixels.shape == (2, 3, 1, 3, 5)
    assert pixels[0, :, 0, 0, 0].tolist() == [0.25, 0.75, 1.0]
    with pytest.raises(ValueError, match=r"weight \[3, C\] and bias \[3\], got \(4, 3\)"):
        LatentPreview(weight=weight.T, bias=torch.zeros(3))


def test_preview_of_a_step():
    pipe: ImagePipeline = fake_pipeline()
    step = last(pipe.stream(["a", "b"]))
    with pytest.raises(ValueError, match="fake has no preview projection"):
        pipe.preview(step)
    projection = LatentPreview(weight=torch.ones(3, 4), bias=torch.zeros(3))
    images = replace(pipe, preview_projection=projection).preview(step)
    assert [image.size for image in images] == [(4, 4), (4, 4)]
    assert pipe.vae.decodes == 0  # type: ignore[attr-defined]


def test_last_of_nothing():
    with pytest.raises(ValueError, match="there are no steps"):
        last([])
