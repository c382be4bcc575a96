"""The contract of text-to-image, with analytic parts."""

import copy
import threading
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from fakes import CHANNELS, FakeDenoiser, FakeEncoder, fake_pipeline
from torch import Tensor

from calotype.denoisers.guidance import ClassifierFree, Distilled, Unguided
from calotype.pipelines.base import ImageStep, last
from calotype.pipelines.image import ImagePipeline
from calotype.pipelines.request import Request
from calotype.pipelines.result import Result
from calotype.schedulers import EulerAncestral, exploding_schedule, flow_schedule, sampler_names


@pytest.fixture
def pipe() -> ImagePipeline:
    return fake_pipeline()


def run(pipe: ImagePipeline, prompt: Any = "a red fox", **arguments: Any) -> Tensor:
    return pipe(prompt, **({"seed": 7, "output_type": "latent"} | arguments)).latents


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_result(pipe: ImagePipeline):
    result = pipe("a red fox", seed=3)
    assert isinstance(result.images, list)
    assert result.images[0].size == (32, 32)
    assert result.latents.shape == (1, CHANNELS, 1, 4, 4)
    assert result.latents.dtype is torch.float32
    assert result.seeds == (3,)
    assert result.warnings == ()
    assert set(result.timings) == {"encode", "prepare", "denoise", "decode", *(f"step {i}" for i in range(4))}
    assert result.timings["denoise"] == pytest.approx(sum(result.timings[f"step {i}"] for i in range(4)))
    assert result.manifest is not None
    assert result.manifest.prompts == ("a red fox",)
    assert result.manifest.task == "text-to-image"


def test_what_it_is_in_a_line(pipe: ImagePipeline):
    assert repr(pipe) == "ImagePipeline(family='fake', name='fake', device='cpu', dtype='float32')"
    assert "dtype='bfloat16'" in repr(pipe.to(dtype="bfloat16"))


@pytest.mark.parametrize("sampler", sampler_names())
@pytest.mark.parametrize("guidance", [None, Unguided(), ClassifierFree(2.0, batched=False, interval=(0.2, 0.9))])
def test_call_is_decode_of_the_last_of_stream(pipe: ImagePipeline, sampler: str, guidance: Any):
    arguments: Any = {"seed": 3, "sampler": sampler, "guidance": guidance, "output_type": "pt"}
    called = pipe("a red fox", **arguments)
    streamed = pipe.decode(last(pipe.stream("a red fox", **arguments)))
    staged = pipe.decode(last(pipe.denoise(pipe.encode(Request(prompt="a red fox", **arguments)))))
    for other in (streamed, staged):
        assert torch.equal(called.latents, other.latents)
        assert torch.equal(tensor(called), tensor(other))
        assert called.manifest == other.manifest


def tensor(result: Result) -> Tensor:
    assert isinstance(result.images, Tensor)
    return result.images


def test_an_encoded_request_can_be_denoised_again(pipe: ImagePipeline):
    encoded = pipe.encode(Request(prompt="a red fox", seed=1, sampler="euler_ancestral"))
    assert torch.equal(last(pipe.denoise(encoded)).latents, last(pipe.denoise(encoded)).latents)


def test_steps(pipe: ImagePipeline):
    steps = list(pipe.stream("a red fox", num_inference_steps=3))
    assert [step.index for step in steps] == [0, 1, 2]
    assert {step.total for step in steps} == {3}
    assert [step.sigma for step in steps] == pytest.approx([2 / 3, 1 / 3, 0])


def test_on_step_sees_every_step_and_returns_what_it_likes(pipe: ImagePipeline):
    seen: list[ImageStep] = []
    run(pipe, on_step=seen.append)
    run(pipe, on_step=lambda step: "ignored")
    assert [step.index for step in seen] == [0, 1, 2, 3]


@pytest.mark.parametrize("sampler", sampler_names())
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_any_number_of_steps_is_finite(pipe: ImagePipeline, sampler: str, steps: int):
    assert run(pipe, sampler=sampler, num_inference_steps=steps).isfinite().all()


@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral"])
@pytest.mark.parametrize("guidance_scale", [0.0, 1.0, 3.0])
def test_a_row_of_a_batch_is_that_row_alone(pipe: ImagePipeline, sampler: str, guidance_scale: float):
    prompts = ["a red fox", "two very small cats on a long table", ""]
    shared: Any = {"sampler": sampler, "guidance_scale": guidance_scale}
    batch = run(pipe, prompts, num_images_per_prompt=2, seed=[5, 9, 2, 5, 1, 0], **shared)
    for row, (prompt, seed) in enumerate(zip([p for p in prompts for _ in range(2)], [5, 9, 2, 5, 1, 0], strict=True)):
        assert relative(batch[row], run(pipe, prompt, seed=seed, **shared)[0]) <= 1e-5


def test_seeds_count_up_in_prompt_major_order(pipe: ImagePipeline):
    result = pipe(["a", "b"], num_images_per_prompt=2, seed=5, output_type="latent")
    assert result.seeds == (5, 6, 7, 8)
    assert result.manifest is not None
    assert result.manifest.prompts == ("a", "a", "b", "b")
    assert relative(result.latents[2], run(pipe, "b", seed=7)[0]) <= 1e-5


def test_without_a_seed_one_is_drawn_and_recorded(pipe: ImagePipeline):
    first, second = pipe("a", output_type="latent"), pipe("a", output_type="latent")
    assert first.seeds != second.seeds
    assert torch.equal(first.latents, run(pipe, "a", seed=first.seeds[0]))


@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral"])
def test_generators_are_copied(pipe: ImagePipeline, sampler: str):
    generators = [torch.Generator().manual_seed(seed) for seed in (7, 8)]
    before = [generator.get_state() for generator in generators]
    result = pipe(["a", "b"], generator=generators, sampler=sampler, output_type="latent")
    assert torch.equal(result.latents, run(pipe, ["a", "b"], seed=7, sampler=sampler))
    assert result.seeds == (7, 8)
    assert all(torch.equal(a, b.get_state()) for a, b in zip(before, generators, strict=True))


def test_a_used_generator_is_used_as_it_is_with_a_warning(pipe: ImagePipeline):
    generator = torch.Generator().manual_seed(7)
    torch.randn(3, generator=generator)
    result = pipe("a", generator=generator, output_type="latent")
    assert not torch.equal(result.latents, run(pipe, "a"))
    assert "seed 7 had been drawn from" in result.warnings[0]


def test_noise_comes_from_the_seed_alone(pipe: ImagePipeline):
    steps = list(pipe.stream("a", seed=3, num_inference_steps=4, guidance=Unguided()))
    noise = torch.randn(CHANNELS, 1, 4, 4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(pipe.encode(Request(prompt="a", seed=3)).noise[0], torch.Generator().manual_seed(3).get_state())
    torch.testing.assert_close(run(pipe, "a", latents=noise[None], guidance=Unguided()), steps[-1].latents)


def test_noise_is_the_same_in_every_dtype():
    seen: dict[torch.dtype, list[Tensor]] = {torch.float32: [], torch.bfloat16: []}
    for dtype, found in seen.items():
        pipe = replace(fake_pipeline(), dtype=dtype)

        def slope(x: Tensor, prepared: object, point: object, found: list[Tensor] = found) -> Tensor:
            found.append(x)
            return torch.zeros_like(x)

        pipe.denoiser.slope = slope  # type: ignore[method-assign]
        run(pipe, "a", sampler="euler_ancestral", guidance=Unguided())
    first, second = seen.values()
    assert len(first) == 4 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].dtype is torch.float32 and not torch.equal(first[0], first[1])


@pytest.mark.parametrize("axes", [4, 5])
def test_given_latents_are_the_initial_noise(pipe: ImagePipeline, axes: int):
    noise = torch.randn(CHANNELS, 1, 4, 4, generator=torch.Generator().manual_seed(7))[None]
    given = noise if axes == 5 else noise[:, :, 0]
    kept = given.clone()
    assert torch.equal(run(pipe, latents=given), run(pipe))
    assert torch.equal(given, kept)


def test_latents_of_another_size(pipe: ImagePipeline):
    with pytest.raises(ValueError, match=r"latents have shape \(1, 4, 5, 5\); this request needs \(1, 4, 1, 4, 4\)"):
        run(pipe, latents=torch.zeros(1, 4, 5, 5))


def test_arguments_are_not_changed(pipe: ImagePipeline):
    prompts, negative, seeds, sigmas = ["a cat", "b"], ["x", "y"], [3, 4], [1.0, 0.4]
    before = copy.deepcopy((prompts, negative, seeds, sigmas))
    first = run(pipe, prompts, negative_prompt=negative, seed=seeds, sigmas=sigmas)
    assert torch.equal(first, run(pipe, prompts, negative_prompt=negative, seed=seeds, sigmas=sigmas))
    assert (prompts, negative, seeds, sigmas) == before


def test_one_negative_prompt_for_all(pipe: ImagePipeline):
    one = run(pipe, ["a", "b"], negative_prompt="x")
    assert torch.equal(one, run(pipe, ["a", "b"], negative_prompt=["x", "x"]))
    assert not torch.equal(one, run(pipe, ["a", "b"]))


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_guidance_scale_0_and_1_are_values(pipe: ImagePipeline, scale: float):
    assert torch.equal(run(pipe, guidance_scale=scale), run(pipe, guidance=ClassifierFree(scale)))
    assert not torch.equal(run(pipe, guidance_scale=scale), run(pipe))


def test_neutral_guidance_is_bit_identical(pipe: ImagePipeline):
    plain = run(pipe, guidance=Unguided())
    assert torch.equal(run(pipe, guidance_scale=1.0), plain)
    assert torch.equal(run(pipe, guidance=ClassifierFree(4.0, interval=(0.3, 0.3))), plain)
    assert torch.equal(run(pipe, guidance_rescale=0.0), run(pipe))
    assert torch.equal(run(pipe, guidance_scale=0.0), run(pipe, "", guidance=Unguided()))


def test_a_negative_prompt_without_effect_is_a_warning(pipe: ImagePipeline):
    assert "negative_prompt has no effect" in pipe("a", negative_prompt="x", guidance_scale=1.0).warnings[0]
    assert pipe("a", guidance_scale=1.0).warnings == ()


def test_precomputed_conditioning_changes_nothing(pipe: ImagePipeline):
    prompts = ["a red fox", "a cat on a long table"]
    encoded = pipe.encode(Request(prompt=prompts, negative_prompt="x", num_images_per_prompt=2))
    expected = run(pipe, prompts, negative_prompt="x", num_images_per_prompt=2)
    conditioning = encoded.conditioning
    assert torch.equal(run(pipe, None, conditioning=conditioning, num_images_per_prompt=2), expected)
    positive = conditioning.positive
    again = run(pipe, None, conditioning=positive, negative_prompt="x", num_images_per_prompt=2)
    assert torch.equal(again, expected)


def test_conditioning_is_in_the_manifest_as_a_digest(pipe: ImagePipeline):
    conditioning = pipe.encode(Request(prompt="a")).conditioning
    manifest = pipe(conditioning=conditioning).manifest
    assert manifest is not None
    assert set(manifest.inputs) == {"conditioning"}


def test_each_prompt_is_encoded_once(pipe: ImagePipeline):
    run(pipe, ["a", "b", "a"], num_images_per_prompt=2)
    encoder = pipe.encoders["llm"]
    assert isinstance(encoder, FakeEncoder)
    assert encoder.asked == [("a", "b"), ("",)]


def test_remarks_of_the_encoder_are_warnings(pipe: ImagePipeline):
    long = " ".join("abcdefghijkl")
    assert pipe([long, "a"], output_type="latent").warnings == (f"{long!r} was cut",)


def test_custom_sigmas_and_schedules(pipe: ImagePipeline):
    expected = run(pipe, sigmas=[1.0, 0.7, 0.2])
    assert torch.equal(run(pipe, sigmas=[1.0, 0.7, 0.2, 0.0]), expected)
    assert torch.equal(run(pipe, sigmas=(1.0, 0.5)), run(pipe, num_inference_steps=2))
    assert torch.equal(run(pipe, schedule=flow_schedule(3, 2.0)), run(replace_shift(pipe), num_inference_steps=3))
    assert len(list(pipe.stream("a", sigmas=[1.0, 0.3]))) == 2


def replace_shift(pipe: ImagePipeline) -> ImagePipeline:
    return replace(pipe, recipe=replace(pipe.recipe, shift=2.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"height": 40}, "height is 40; it must be a multiple of 16, such as 32 or 48"),
        ({"width": 511}, "width is 511; it must be a multiple of 16, such as 496 or 512"),
        ({"width": 16}, "width is 16; it must be from 32 to 512"),
        ({"height": 1024}, "height is 1024; it must be from 32 to 512"),
        ({"sigmas": [0.5, 0.7]}, "0.7"),
        ({"sigmas": [1.5]}, "1.5"),
        ({"sampler": "euler9"}, "unknown sampler 'euler9': known are euler, "),
        ({"schedule": exploding_schedule(3)}, "schedule is on the exploding path"),
        ({"num_frames": 3}, "num_frames: fake does not use this argument"),
        ({"guidance": Distilled(3.0)}, "this model is told no value, give ClassifierFree"),
    ],
)
def test_mistakes_are_found_before_any_compute(pipe: ImagePipeline, arguments: dict[str, Any], message: str):
    for call in (pipe, pipe.stream):
        with pytest.raises(ValueError, match=message):
            call("a", **arguments)
    encoder, denoiser = pipe.encoders["llm"], pipe.denoiser
    assert isinstance(encoder, FakeEncoder) and not encoder.asked
    assert isinstance(denoiser, FakeDenoiser) and not denoiser.prepares


@pytest.mark.parametrize(("width", "height"), [(32, 48), (64, 32)])
def test_sizes(pipe: ImagePipeline, width: int, height: int):
    images = pipe("a", width=width, height=height).images
    assert isinstance(images, list)
    assert images[0].size == (width, height)


def test_output_types(pipe: ImagePipeline):
    shapes = {"np": (1, 32, 32, 3), "pt": (1, 3, 32, 32)}
    for output_type, shape in shapes.items():
        images = pipe("a", seed=1, output_type=output_type).images  # type: ignore[arg-type]
        assert isinstance(images, numpy.ndarray | Tensor)
        assert images.shape == shape
    assert pipe("a", output_type="latent").images is None
    assert pipe.vae.decodes == 2  # type: ignore[attr-defined]


def test_two_threads_on_one_pipeline(pipe: ImagePipeline):
    expected = {steps: run(pipe, num_inference_steps=steps, sampler="euler_ancestral") for steps in (13, 20)}
    results: dict[tuple[int, int], Tensor] = {}

    def work(steps: int) -> None:
        for turn in range(3):
            results[steps, turn] = run(pipe, num_inference_steps=steps, sampler="euler_ancestral")

    threads = [threading.Thread(target=work, args=(steps,)) for steps in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    assert all(torch.equal(latents, expected[steps]) for (steps, _), latents in results.items())


def test_a_crashed_or_abandoned_call_leaves_nothing(pipe: ImagePipeline):
    expected = run(pipe)
    abandoned = pipe.stream("a cat", seed=1)
    next(abandoned)

    def crash(step: ImageStep) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        run(pipe, on_step=crash)
    assert torch.equal(run(pipe), expected)
    assert len(list(abandoned)) == 3


def test_gradients_are_off_inside_and_untouched_outside(pipe: ImagePipeline):
    for step in pipe.stream("a", num_inference_steps=2):
        assert torch.is_grad_enabled()
        assert not step.latents.requires_grad
    latents = run(pipe)
    latents.add_(1.0)  # an inference tensor would refuse


def test_latents_alone_can_be_decoded(pipe: ImagePipeline):
    result = pipe("a", seed=3)
    again = pipe.decode(result.latents)
    assert result.pil()[0].tobytes() == again.pil()[0].tobytes()
    assert again.seeds == () and again.manifest is None
    with pytest.raises(ValueError, match=r"\(1, 4, 4\)"):
        pipe.decode(result.latents[0, :, 0][None, 0])


def test_any_step_can_be_decoded(pipe: ImagePipeline):
    step = next(iter(pipe.stream("a", seed=3)))
    result = pipe.decode(step)
    assert torch.equal(result.latents, step.latents)
    assert result.seeds == (3,)


def test_a_sampler_object_of_ones_own(pipe: ImagePipeline):
    assert torch.equal(run(pipe, sampler=EulerAncestral(eta=0.0)), run(pipe))
