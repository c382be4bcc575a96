from typing import Any

import numpy
import pytest
import torch

from calotype.denoisers.base import Conditioning, Prompt
from calotype.denoisers.guidance import ClassifierFree, Unguided
from calotype.pipelines.arguments import nearest
from calotype.pipelines.family import PlainFamily
from calotype.pipelines.request import Request
from calotype.pipelines.texts import OtherTexts
from calotype.schedulers import Heun, flow_schedule

ROWS = Conditioning(states=torch.zeros(2, 3, 4), lengths=torch.tensor([3, 1]))
TOO_LONG = Conditioning(states=torch.zeros(2, 3, 4), lengths=torch.tensor([4, -1]))
NAN_LATENTS = torch.full((1, 4, 4, 4), torch.nan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": None}, "give either prompt or conditioning"),
        ({"prompt": "a", "conditioning": ROWS}, "not both"),
        ({"prompt": []}, "prompt is an empty list; it takes at least one string"),
        ({"prompt": 3}, "prompt is of type int; it must be a string"),
        ({"prompt": ["a", None]}, "prompt holds None of type NoneType"),
        ({"prompt": None, "conditioning": "a"}, "conditioning is of type str"),
        ({"prompt": None, "conditioning": ROWS.rows([])}, "conditioning has no rows"),
        ({"prompt": None, "conditioning": TOO_LONG}, r"lengths are \[4, -1\]; its states have from 0 to 3 tokens"),
        ({"negative_prompt": ["a", "b"]}, "2 negative prompts for 1 prompts; give one for all, or one per prompt"),
        ({"negative_prompt": 1.5}, "negative_prompt is of type float"),
        ({"negative_prompt": []}, "negative_prompt is an empty list"),
        ({"height": 64.0}, "height is 64.0; it must be a whole number"),
        ({"width": True}, "width is True; it must be a whole number"),
        ({"num_inference_steps": 0}, "num_inference_steps is 0; it must be from 1 to 1000"),
        ({"num_inference_steps": 1_000_000}, "num_inference_steps is 1000000; it must be from 1 to 1000"),
        ({"num_images_per_prompt": 1_000_000}, "num_images_per_prompt is 1000000; it must be from 1 to 1000"),
        ({"generator": 5}, "generator is 5; it must be a torch.Generator"),
        ({"seed": numpy.bool_(True)}, "seed is True; it must be a whole number"),
        ({"sigmas": {1.0}}, "sigmas is of type set; it must be a list"),
        ({"latents": torch.zeros(1, 8, 4, 4, device="meta")}, "it must be a dense one"),
        ({"latents": torch.zeros(1, 8, 4, 4).to_sparse()}, "it must be a dense one"),
        ({"latents": torch.zeros(1, 8, 4, 4).to(torch.float8_e5m2)}, "it must be a float tensor"),
        ({"num_inference_steps": -1}, "num_inference_steps is -1; it must be from 1 to 1000"),
        ({"num_inference_steps": 2.5}, "num_inference_steps is 2.5"),
        ({"num_images_per_prompt": 0}, "num_images_per_prompt is 0; it must be from 1 to 1000"),
        ({"num_images_per_prompt": None}, "num_images_per_prompt is None"),
        ({"guidance_scale": "high"}, "guidance_scale is 'high'; it must be a finite number"),
        ({"guidance_scale": float("inf")}, "guidance_scale is inf"),
        ({"guidance_rescale": 1.5}, "guidance_rescale is 1.5; it must be from 0 to 1"),
        ({"guidance_scale": 2.0, "guidance": Unguided()}, "guidance_scale: guidance, an object"),
        ({"mask_image": "x.png"}, "mask_image: it needs an image"),
        ({"strength": 0.5}, "strength: it needs an image"),
        ({"image": "x.png", "strength": 1.5}, "strength is 1.5; it must be from 0 to 1"),
        ({"image": "x.png", "strength": -0.1}, "strength is -0.1; it must be from 0 to 1"),
        ({"image": "x.png", "strength": float("nan")}, "strength is nan"),
        ({"seed": -1}, "seed is -1; it must be a whole number from 0"),
        ({"seed": 2**63}, f"seed is {2**63}"),
        ({"seed": 1.0}, "seed is 1.0"),
        ({"seed": "7"}, "seed is '7'"),
        ({"seed": [1, 2]}, "2 seeds for 1 pictures"),
        ({"seed": 1, "generator": torch.Generator()}, "seed and generator: give one of the two"),
        ({"generator": [torch.Generator(), torch.Generator()]}, "2 generators for 1 pictures"),
        ({"generator": [torch.Generator()] * 2, "prompt": ["a", "b"]}, "generator: one is given for two pictures"),
        ({"generator": torch.Generator(), "num_images_per_prompt": 2}, "1 generators for 2 pictures"),
        ({"generator": [7]}, "generator is 7; it must be a torch.Generator on the CPU"),
        ({"sigmas": []}, r"sigmas is \[\]"),
        ({"sigmas": [0.0]}, r"sigmas is \[0.0\]; it must begin with a number above 0"),
        ({"sigmas": [1.0, "x"]}, "sigmas is .*at least one finite number"),
        ({"sigmas": [1.0], "schedule": flow_schedule(1)}, "sigmas and schedule"),
        ({"sigmas": [1.0, 0.5], "num_inference_steps": 3}, "num_inference_steps is 3, but sigmas has 2 steps"),
        ({"schedule": flow_schedule(2), "num_inference_steps": 3}, "but schedule has 2 steps"),
        ({"schedule": [1.0, 0.0]}, "schedule is of type list"),
        ({"sampler": 3}, r"sampler is 3; it must be an object such as Heun\(\), or a name"),
        ({"sampler": Heun}, "sampler is <class .*it must be an object"),
        ({"guidance": 3.0}, r"guidance is 3\.0; it must be an object such as ClassifierFree"),
        ({"guidance": ClassifierFree}, "guidance is <class .*it must be an object"),
        ({"generator": 7}, "generator is 7; it must be a torch.Generator"),
        ({"sigmas": 0.5}, "sigmas is of type float; it must be a list of numbers"),
        ({"output_type": "jpg"}, "output_type is 'jpg'; it must be one of pil, np, pt, latent"),
        ({"latents": [1.0]}, "latents is list"),
        ({"latents": torch.zeros(4, 4)}, r"latents is tensor \(4, 4\)"),
        ({"latents": torch.zeros(1, 4, 4, 4, dtype=torch.int64)}, "it must be a float tensor"),
        ({"latents": torch.zeros(2, 4, 4, 4)}, "latents has 2 rows for 1 pictures"),
        ({"latents": NAN_LATENTS}, "latents holds values that are not finite"),
    ],
)
def test_mistakes(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Request(**({"prompt": "a cat"} | arguments))


def test_negative_in_conditioning_and_as_text():
    with pytest.raises(ValueError, match="already holds the negative rows"):
        Request(conditioning=Prompt(positive=ROWS, negative=ROWS), negative_prompt="x")


@pytest.mark.parametrize(
    ("prompt", "negative", "expected"),
    [
        ("a", None, ("",)),
        ("a", "x", ("x",)),
        (["a", "b"], None, ("", "")),
        (["a", "b"], "x", ("x", "x")),
        (["a", "b"], ["x", "y"], ("x", "y")),
        (("a", "b"), ("x", ""), ("x", "")),
    ],
)
def test_negative_prompts(prompt: Any, negative: Any, expected: tuple[str, ...]):
    assert Request(prompt=prompt, negative_prompt=negative).negative_prompts == expected


def test_counts():
    assert Request(prompt=["a", "b"], num_images_per_prompt=3).num_images == 6
    assert Request(conditioning=ROWS).num_prompts == 2
    assert Request(prompt="").num_images == 1


def test_final_zero_is_no_step():
    assert Request(prompt="a", sigmas=[1.0, 0.5, 0.0], num_inference_steps=2).sigmas == [1.0, 0.5, 0.0]


def test_other_texts():
    request = Request(prompt=["a", "b"], prompt_2="x", negative_prompt="n", negative_prompt_3=["y", "z"])
    assert request.other_prompts == OtherTexts(second=("x", "x"), third=("a", "b"))
    assert request.other_negatives == OtherTexts(second=("n", "n"), third=("y", "z"))
    assert Request(prompt="a").other_negatives.are_empty


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_3": ["a"] * 3}, "3 texts in prompt_3 for 2 prompts; give one for all, or one per prompt"),
        ({"prompt_2": 3}, "prompt_2 is of type int; it must be a string or a list of strings"),
        ({"negative_prompt_2": "a"}, "negative_prompt_2: give a negative_prompt for the first text encoder as well"),
        ({"prompt": None, "conditioning": ROWS, "prompt_3": "a"}, "prompt_3: conditioning is given, which stands for"),
    ],
)
def test_wrong_other_texts(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Request(**{"prompt": ["a", "b"], **arguments})


@pytest.mark.parametrize(
    "name", ["num_frames", "control_image", "true_cfg_scale", "prompt_2", "negative_prompt_3", "clip_skip"]
)
def test_arguments_of_other_families(name: str):
    with pytest.raises(ValueError, match=f"{name}: plate does not use this argument; it takes conditioning, "):
        Request.of("a", {name: 3}, "plate", PlainFamily().arguments)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("steps", "num_inference_steps"),
        ("num_steps", "num_inference_steps"),
        ("num_inference_step", "num_inference_steps"),
        ("guidance_scal", "guidance_scale"),
        ("seeds", "seed"),
        ("negative", "negative_prompt"),
        ("mask", "mask_image"),
    ],
)
def test_unknown_arguments(name: str, meant: str):
    with pytest.raises(ValueError, match=f"{name}: unknown argument; did you mean {meant}?"):
        Request.of("a", {name: 3}, "plate", PlainFamily().arguments)  # type: ignore[misc]


def test_numbers_of_numpy_and_torch():
    request = Request(
        prompt="a",
        height=numpy.int64(64),  # type: ignore[arg-type]
        strength=None,
        guidance_scale=numpy.float32(2.0),  # type: ignore[arg-type]
        sigmas=numpy.linspace(1.0, 0.0, 3),  # type: ignore[arg-type]
        seed=torch.tensor([5]),  # type: ignore[arg-type]
    )
    assert (request.height, request.guidance_scale, request.sigmas, request.seed) == (64, 2.0, [1.0, 0.5, 0.0], [5])
    assert type(request.height) is int


def test_nearest_prefers_names_that_contain_the_word():
    assert nearest("scale", ("seed", "guidance_scale", "false")) == "guidance_scale"


def test_an_argument_that_is_like_none():
    with pytest.raises(ValueError, match=r"foo: unknown argument; there are .*negative_prompt"):
        Request.of("a", {"foo": 1}, "plate", PlainFamily().arguments)  # type: ignore[misc]
