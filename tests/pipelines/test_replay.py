"""Replay: the run of a file's manifest, again."""

import dataclasses
import json
from pathlib import Path

import numpy
import pytest
import torch

from calotype.denoisers.guidance import ClassifierFree, Unguided
from calotype.pipelines.files import is_lossy_webp, open_image, save_image
from calotype.pipelines.image import ImagePipeline
from calotype.pipelines.manifest import Manifest
from calotype.pipelines.replay import changes, largest_difference, rebuild, replay
from calotype.pipelines.request import Request
from calotype.schedulers import DPMPP2M, Euler, EulerAncestral, Heun, flow_schedule


@pytest.fixture
def pipe(tiny_plate: ImagePipeline) -> ImagePipeline:
    return tiny_plate


@pytest.mark.parametrize("sampler", [Euler(), Heun(), DPMPP2M(), EulerAncestral(eta=0.7)])
@pytest.mark.parametrize("guidance", [Unguided(), ClassifierFree(2.5, batched=False, interval=(0.2, 0.9), rescale=0.3)])
def test_bit_equal(pipe: ImagePipeline, tmp_path: Path, sampler, guidance):
    made = pipe(
        ["a fox", "a cow"], negative_prompt=["", "x"], seed=[5, 3], width=48, sampler=sampler, guidance=guidance
    )
    for path in made.save(tmp_path / "a.png"):
        replayed = replay(path, pipeline=pipe)
        assert replayed.bit_equal and replayed.remarks == ()
        assert torch.equal(replayed.result.latents, made.latents)
        assert replayed.again == replayed.manifest


def test_its_own_schedule_and_strength(pipe: ImagePipeline, tmp_path: Path):
    schedule = flow_schedule(4, shift=3.0)
    schedule = dataclasses.replace(
        schedule, points=tuple(dataclasses.replace(point, time=point.time**1.1) for point in schedule.points)
    )
    image = pipe("a cow", seed=1).images[0]
    made = pipe("a fox", seed=2, schedule=schedule, image=image, strength=0.6)
    (path,) = made.save(tmp_path / "a.webp")
    replayed = replay(path, image=image, pipeline=pipe)
    assert replayed.bit_equal and torch.equal(replayed.result.latents, made.latents)


def test_the_model_is_loaded_from_its_name(pipe: ImagePipeline, tmp_path: Path):
    from calotype.pipelines.load import load

    pipe.save(tmp_path / "model")
    (path,) = load(tmp_path / "model", attention="reference")("a fox", seed=2).save(tmp_path / "a.png")
    replayed = replay(path)
    assert replayed.bit_equal and replayed.again.attention == "reference"


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_a_grid_is_replayed_whole(pipe: ImagePipeline, tmp_path: Path, columns: int):
    made = pipe("a fox", seed=1, num_images_per_prompt=3)
    path = made.save_grid(tmp_path / "a.png", columns)
    replayed = replay(path, pipeline=pipe)
    assert replayed.bit_equal and replayed.image.size == open_image(path).size and replayed.again == made.manifest


def test_a_jpeg_is_compared_as_a_jpeg(pipe: ImagePipeline, tmp_path: Path):
    made = pipe("a fox", seed=2, num_images_per_prompt=2)
    for path in (made.save(tmp_path / "a.jpg")[1], made.save_grid(tmp_path / "b.jpeg")):
        replayed = replay(path, pipeline=pipe)
        assert replayed.bit_equal and replayed.lossy and 0 < replayed.largest_difference < 64
        assert replayed.remarks == ("JPEG is lossy: pixels in the file differ from those that were made",)
    other = pipe("a cow", seed=3, num_images_per_prompt=2)
    path = save_image(other.images[0], tmp_path / "c.jpg", made.manifest.for_row(0))
    assert not replay(path, pipeline=pipe).bit_equal


def test_pictures_that_were_saved_again_with_loss(pipe: ImagePipeline, tmp_path: Path):
    (path,) = pipe("a fox", seed=2).save(tmp_path / "a.webp")
    assert not is_lossy_webp(path) and replay(path, pipeline=pipe).remarks == ()
    image = open_image(path)
    image.save(tmp_path / "b.webp", quality=60, exif=image.getexif())
    again = replay(tmp_path / "b.webp", pipeline=pipe)
    assert not again.bit_equal and again.lossy
    assert again.remarks == (
        "this WebP, which another program has saved again, is lossy: pixels in the file differ from those that were "
        "made",
    )
    image.convert("RGB").save(tmp_path / "c.jpg", quality=40, exif=image.getexif())
    again = replay(tmp_path / "c.jpg", pipeline=pipe)
    assert not again.bit_equal and again.remarks[0].startswith("JPEG is lossy")


def test_a_resized_file_is_refused(pipe: ImagePipeline, tmp_path: Path):
    made = pipe("a fox", seed=2)
    path = save_image(made.images[0].resize((64, 64)), tmp_path / "a.png", made.manifest.for_row(0))
    with pytest.raises(ValueError, match="is 64x64, its manifest says 1 of 32x32: it was changed"):
        replay(path, pipeline=pipe)


def test_inputs_must_be_the_same(pipe: ImagePipeline, tmp_path: Path):
    first, second = pipe("a cow", seed=1, num_images_per_prompt=2).images
    (plain,) = pipe("a fox", seed=1).save(tmp_path / "plain.png")
    (path,) = pipe("a fox", seed=2, image=first).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="this image-to-image run needs its image"):
        replay(path, pipeline=pipe)
    with pytest.raises(ValueError, match="this is not the image of that run"):
        replay(path, image=second, pipeline=pipe)
    with pytest.raises(ValueError, match="mask_image was given, but this image-to-image run had none"):
        replay(path, image=first, mask_image=first, pipeline=pipe)
    with pytest.raises(ValueError, match="image was given, but this text-to-image run had none"):
        replay(plain, image=first, pipeline=pipe)


def test_inputs_alone_and_in_lists(pipe: ImagePipeline, tmp_path: Path):
    first, second = pipe("a cow", seed=1, num_images_per_prompt=2).images
    (alone,) = pipe("a fox", seed=2, image=[first]).save(tmp_path / "alone.png")
    assert replay(alone, image=first, pipeline=pipe).bit_equal
    both = pipe(["a fox", "a cow"], seed=2, image=[first, second]).save(tmp_path / "both.png")
    assert replay(both[1], image=[first, second], pipeline=pipe).bit_equal
    with pytest.raises(ValueError, match="this is not the image of that run"):
        replay(both[1], image=[second, first], pipeline=pipe)


@pytest.mark.parametrize("name", ["latents", "generator", "conditioning"])
def test_what_a_file_cannot_hold_is_refused(pipe: ImagePipeline, tmp_path: Path, name: str):
    drawn_from = torch.Generator()
    torch.rand(1, generator=drawn_from)
    values = {
        "latents": lambda: {"prompt": "a", "latents": torch.zeros(1, 8, 4, 4)},
        "generator": lambda: {"prompt": "a", "generator": drawn_from},
        "conditioning": lambda: {"conditioning": pipe.encode(Request(prompt="a")).conditioning},
    }
    (path,) = pipe(**values[name](), guidance=Unguided()).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=f"cannot replay a run that was given {name}"):
        replay(path, pipeline=pipe)


def test_a_fresh_generator_is_its_seed(pipe: ImagePipeline, tmp_path: Path):
    (path,) = pipe("a fox", generator=torch.Generator().manual_seed(7)).save(tmp_path / "a.png")
    assert replay(path, pipeline=pipe).bit_equal


def test_rebuild():
    assert rebuild({"type": "EulerAncestral", "eta": 0.5}, (Euler, EulerAncestral)) == EulerAncestral(eta=0.5)
    with pytest.raises(ValueError, match="cannot replay a run with 'Mine': only Euler can be made from a file"):
        rebuild({"type": "Mine"}, (Euler,))
    with pytest.raises(ValueError, match="cannot replay Euler"):
        rebuild({"type": "Euler", "colour": 1}, (Euler,))


def test_changes_are_listed(pipe: ImagePipeline):
    manifest = pipe("a fox", seed=1).manifest
    other = json.loads(manifest.to_json()) | {"torch": "1.0", "threads": 99, "weights": {"a": "b"}}
    assert changes(Manifest.from_json(json.dumps(other)), manifest) == (
        f"torch was 1.0, is now {manifest.torch}",
        "weights differ",
        f"threads was 99, is now {manifest.threads}",
    )


def test_largest_difference():
    from PIL import Image

    black = Image.new("RGB", (3, 2))
    other = numpy.zeros((2, 3, 3), numpy.uint8)
    other[1, 2, 0] = 255
    assert largest_difference(black, black) == 0 and largest_difference(black, Image.fromarray(other)) == 255
