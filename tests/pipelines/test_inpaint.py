"""Image-to-image and inpainting, with analytic parts."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from fakes import CHANNELS, FakeDenoiser, FakeEncoder, fake_pipeline
from PIL import Image
from torch import Tensor

from calotype.denoisers.guidance import Unguided
from calotype.pipelines.image import ImagePipeline
from calotype.schedulers import sampler_names


@pytest.fixture
def pipe() -> ImagePipeline:
    return fake_pipeline()


def picture(seed: int = 0, size: tuple[int, int] = (32, 32)) -> Image.Image:
    pixels = numpy.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8)
    return Image.fromarray(pixels)


def centre_mask(size: tuple[int, int] = (32, 32)) -> Image.Image:
    mask = Image.new("L", size, 0)
    mask.paste(255, (10, 9, 21, 22))
    return mask


def run(pipe: ImagePipeline, prompt: Any = "a red fox", **arguments: Any) -> Tensor:
    return pipe(prompt, **({"seed": 7, "output_type": "latent", "image": picture()} | arguments)).latents


def array(image: Image.Image) -> numpy.ndarray:
    return numpy.asarray(image).astype(int)


@pytest.mark.parametrize(
    ("strength", "steps", "expected"),
    [(0.01, 4, 1), (0.25, 4, 1), (0.5, 4, 2), (0.99, 4, 3), (1.0, 4, 4), (0.3, 1, 1), (1.0, 1, 1)],
)
def test_strength_is_the_share_of_steps(pipe: ImagePipeline, strength: float, steps: int, expected: int):
    stream = pipe.stream("a", image=picture(), strength=strength, num_inference_steps=steps)
    taken = list(stream)
    assert len(taken) == expected
    assert taken[-1].latents.isfinite().all()


@pytest.mark.parametrize("strength", [0.0, 0])
def test_strength_0_is_the_round_trip(pipe: ImagePipeline, strength: float):
    images = pipe("a", image=picture(), strength=strength, output_type="pt").images
    pixels = torch.from_numpy(numpy.array(picture())).permute(2, 0, 1)[None, :, None].float() / 127.5 - 1
    expected = pipe.vae.decode(pipe.vae.encode(pixels))
    assert isinstance(images, Tensor)
    torch.testing.assert_close(images, expected[:, :, 0] / 2 + 0.5)
    assert isinstance(pipe.denoiser, FakeDenoiser) and not pipe.denoiser.rows
    (step,) = pipe.stream("a", image=picture(), strength=strength)
    assert (step.total, step.sigma) == (0, 0.0)


def test_strength_1_starts_from_noise_alone(pipe: ImagePipeline):
    expected = pipe("a red fox", seed=7, output_type="latent").latents
    assert torch.equal(run(pipe, strength=1.0), expected)


def test_starts_at_the_right_noise_level(pipe: ImagePipeline):
    zero = torch.zeros(1, CHANNELS, 4, 4)
    seen: list[Tensor] = []

    def slope(x: Tensor, prepared: object, point: object) -> Tensor:
        seen.append(x)
        return torch.zeros_like(x)

    pipe.denoiser.slope = slope  # type: ignore[method-assign]
    run(pipe, strength=0.5, latents=zero, guidance=Unguided())
    source = run(fake_pipeline(), strength=0.0)
    torch.testing.assert_close(seen[0], 0.5 * source)


def test_a_default_strength(pipe: ImagePipeline):
    assert torch.equal(run(pipe), run(pipe, strength=pipe.recipe.strength))
    assert pipe("a", image=picture()).manifest.strength == 0.8  # type: ignore[union-attr]


@pytest.mark.parametrize("sampler", sampler_names())
def test_pixels_outside_the_mask_are_the_inputs(pipe: ImagePipeline, sampler: str):
    result = pipe("a red fox", image=picture(), mask_image=centre_mask(), strength=1.0, seed=7, sampler=sampler)
    outside = array(centre_mask()) == 0
    made, given = array(result.pil()[0]), array(picture())
    assert (made == given)[outside].all()
    assert (made != given)[~outside].any(-1).mean() > 0.9
    assert result.manifest is not None and result.manifest.task == "inpaint"


def test_a_black_mask_is_the_input(pipe: ImagePipeline):
    black = Image.new("L", (32, 32), 0)
    result = pipe("a red fox", image=picture(), mask_image=black, strength=1.0)
    assert (array(result.pil()[0]) == array(picture())).all()


@pytest.mark.parametrize("sampler", sampler_names())
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_a_white_mask_is_image_to_image(pipe: ImagePipeline, sampler: str, strength: float):
    white = Image.new("L", (32, 32), 255)
    shared: Any = {"image": picture(), "seed": 7, "sampler": sampler, "strength": strength, "output_type": "pt"}
    painted, plain = pipe("a fox", mask_image=white, **shared), pipe("a fox", **shared)
    assert torch.equal(painted.latents, plain.latents)
    assert isinstance(painted.images, Tensor) and isinstance(plain.images, Tensor)
    assert torch.equal(painted.images, plain.images)


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpmpp_2m"])
def test_known_latents_keep_their_noise_at_every_level(pipe: ImagePipeline, sampler: str):
    noise = torch.randn(1, CHANNELS, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    source = run(pipe, strength=0.0)
    arguments: Any = {"image": picture(), "mask_image": centre_mask(), "latents": noise, "sampler": sampler}
    repaint = torch.zeros(4, 4, dtype=torch.bool)
    repaint[1:3, 1:3] = True
    for step in pipe.stream("a red fox", strength=1.0, **arguments):
        known = (1 - step.sigma) * source + step.sigma * noise
        torch.testing.assert_close(step.latents[..., ~repaint], known[..., ~repaint], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(step.denoised[..., ~repaint], source[..., ~repaint], rtol=1e-5, atol=1e-5)
        assert (step.denoised - source)[..., repaint].abs().min() > 1e-4


@pytest.mark.parametrize("masked", [False, True])
def test_rows_alone(pipe: ImagePipeline, masked: bool):
    images = [picture(0), picture(1)]
    mask: Any = {"mask_image": [centre_mask(), Image.new("L", (32, 32), 255)]} if masked else {}
    batch = run(pipe, ["a fox", "b"], image=images, num_images_per_prompt=2, **mask)
    for row in range(4):
        one: Any = {"mask_image": mask["mask_image"][row // 2]} if masked else {}
        alone = run(pipe, ["a fox", "b"][row // 2], image=images[row // 2], seed=7 + row, **one)
        assert (batch[row] - alone[0]).norm() / alone.norm() <= 1e-5


@pytest.mark.parametrize("count", [1, 2, 4])
def test_one_image_for_all_per_prompt_or_per_picture(pipe: ImagePipeline, count: int):
    images = [picture(seed) for seed in range(count)]
    batch = run(pipe, ["a", "b"], num_images_per_prompt=2, strength=0.0, image=images)
    source = [run(pipe, strength=0.0, image=image)[0] for image in images]
    order = {1: [0, 0, 0, 0], 2: [0, 0, 1, 1], 4: [0, 1, 2, 3]}[count]
    assert all(torch.equal(batch[row], source[index]) for row, index in enumerate(order))


def test_inputs_are_not_changed(pipe: ImagePipeline):
    image, mask = numpy.array(picture()), numpy.array(centre_mask())
    tensor = torch.from_numpy(image.copy()).permute(2, 0, 1) / 255
    kept = tensor.clone()
    first = run(pipe, image=image, mask_image=mask)
    assert torch.equal(run(pipe, image=tensor, mask_image=centre_mask()), first)
    assert (image == numpy.array(picture())).all() and (mask == numpy.array(centre_mask())).all()
    assert torch.equal(tensor, kept)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask_image": centre_mask((32, 48))}, "mask_image is 32x48 and image is 32x32; they must be of one size"),
        ({"height": 64}, "image is 32x32 and 32x64 was asked for"),
        ({"image": picture(size=(40, 32))}, "image's width is 40; it must be a multiple of 16, such as 32 or 48"),
        ({"image": [picture()] * 3}, "image holds 3 pictures for 1 prompts of 1 pictures each"),
        ({"image": [picture(), picture(size=(48, 32))]}, "image holds pictures of sizes 32x32 and 48x32"),
        ({"image": 7}, "image is of type int"),
        ({"image": "nowhere.png"}, "nowhere.png"),
    ],
)
def test_mistakes_are_found_before_any_compute(pipe: ImagePipeline, arguments: dict[str, Any], message: str):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(pipe, **arguments)
    encoder = pipe.encoders["llm"]
    assert isinstance(encoder, FakeEncoder) and not encoder.asked


def test_the_manifest_has_digests_of_the_inputs(pipe: ImagePipeline, tmp_path: Path):
    picture().save(tmp_path / "fox.png")
    from_file = pipe("a", image=tmp_path / "fox.png", mask_image=centre_mask(), seed=1).manifest
    from_memory = pipe("a", image=picture(), mask_image=centre_mask(), seed=1).manifest
    assert from_file is not None and from_memory is not None
    assert set(from_file.inputs) == {"image", "mask_image"}
    assert from_file == from_memory
