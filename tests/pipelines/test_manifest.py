"""The manifest: what it holds, and that JSON loses nothing."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from calotype.denoisers.causal import Chunks
from calotype.denoisers.guidance import ClassifierFree
from calotype.pipelines.manifest import Manifest, describe, digest_input
from calotype.schedulers import Euler, exploding_schedule, flow_schedule


def build(**changes) -> Manifest:
    arguments = {
        "family": "plate",
        "model": "plate",
        "weights": {"denoiser.safetensors": "ab"},
        "task": "text-to-image",
        "prompts": ["a fox", "ein Käfer \udc80"],
        "negative_prompts": ["", "blurry"],
        "seeds": [2**63 - 1, 8],
        "width": 160,
        "height": 128,
        "schedule": flow_schedule(3, shift=1.7),
        "sampler": Euler(),
        "guidance": ClassifierFree(3.0, interval=(0.1, 0.9)),
        "strength": None,
        "inputs": {},
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "attention": "sdpa",
    }
    return Manifest.build(**(arguments | changes))


def test_json_round_trip_is_exact():
    for manifest in (
        build(),
        build(negative_prompts=None, strength=0.1 + 0.2).for_row(1),
        build(chunks=Chunks(frames=2, window=4)),
    ):
        text = manifest.to_json()
        assert text.isascii() and "\n" not in text
        assert Manifest.from_json(text) == manifest


def test_it_says_what_ran():
    manifest = build()
    assert manifest.torch == torch.__version__ and manifest.threads == torch.get_num_threads()
    assert (manifest.dtype, manifest.device, manifest.num_inference_steps) == ("float32", "cpu", 3)
    assert manifest.sampler["type"] == "Euler"
    assert manifest.guidance == {
        "type": "ClassifierFree",
        "scale": 3.0,
        "batched": True,
        "interval": [0.1, 0.9],
        "rescale": 0.0,
        "renormalise": None,
    }


@pytest.mark.parametrize("schedule", [flow_schedule(5, shift=3.0), exploding_schedule(4, 0.03, 14.0)])
def test_the_schedule_comes_back_bit_equal(schedule):
    assert Manifest.from_json(build(schedule=schedule).to_json()).schedule == schedule


def test_a_row_has_its_own_seed_and_prompt():
    row = build().for_row(1)
    assert (row.seed, row.prompt, row.row) == (8, "ein Käfer \udc80", 1)
    entries = json.loads(row.to_json())
    assert (entries["seed"], entries["prompt"]) == (8, "ein Käfer \udc80")
    assert (build().seed, build().prompt) == (2**63 - 1, "a fox")
    with pytest.raises(ValueError, match="row 2: the batch has 2 pictures"):
        build().for_row(2)


def test_bad_json_is_refused_with_the_reason():
    entries = json.loads(build().to_json())
    with pytest.raises(ValueError, match="not a manifest"):
        Manifest.from_json("{")
    with pytest.raises(ValueError, match="JSON of type list"):
        Manifest.from_json("[]")
    with pytest.raises(ValueError, match="format 99: this version reads format 1"):
        Manifest.from_json(json.dumps(entries | {"format": 99}))
    with pytest.raises(ValueError, match=r"missing \['width'\], unknown \['colour'\]"):
        Manifest.from_json(json.dumps({k: v for k, v in entries.items() if k != "width"} | {"colour": 1}))
    with pytest.raises(ValueError, match="row 5"):
        Manifest.from_json(json.dumps(entries | {"row": 5}))
    with pytest.raises(ValueError, match="seeds is 3, expected list"):
        Manifest.from_json(json.dumps(entries | {"seeds": 3}))
    with pytest.raises(ValueError, match="strength is '1', expected float or int or NoneType"):
        Manifest.from_json(json.dumps(entries | {"strength": "1"}))
    for change, message in (
        ({"sigmas": ["x"]}, "sigmas holds 'x', expected float"),
        ({"prompts": [3, 4]}, "prompts holds 3, expected str"),
        ({"seeds": [1]}, "2 prompts for 1 seeds"),
        ({"sigmas": []}, "0 sigmas for"),
        ({"threads": 0}, "threads is 0, expected at least 1"),
        ({"inputs": {"image": 3}}, "inputs holds 3 for image, expected a str"),
        ({"weights": {"a": None}}, "weights holds None for a, expected a str"),
    ):
        with pytest.raises(ValueError, match=f"not a manifest: {message}"):
            Manifest.from_json(json.dumps(entries | change))


def test_describe():
    @dataclass(frozen=True)
    class Part:
        scale: float
        ends: tuple[float, float]

    class Opaque:
        pass

    assert describe(Part(scale=2.0, ends=(0.0, 1.0))) == {"type": "Part", "scale": 2.0, "ends": [0.0, 1.0]}
    assert describe(Opaque()) == {"type": "Opaque"}
    mine = Part(scale=numpy.float32(0.5), ends=(Part(1.0, ()), torch.ones(3)))  # type: ignore[arg-type]
    inner = {"type": "Part", "scale": 1.0, "ends": []}
    assert describe(mine) == {"type": "Part", "scale": 0.5, "ends": [inner, {"type": "Tensor"}]}


def test_digests(tmp_path: Path):
    image = Image.fromarray(numpy.arange(48, dtype=numpy.uint8).reshape(4, 4, 3))
    image.save(tmp_path / "a.png")
    assert digest_input(image) == digest_input(tmp_path / "a.png") == digest_input(str(tmp_path / "a.png"))
    assert digest_input(image) == digest_input(numpy.asarray(image)) == digest_input(torch.tensor(numpy.asarray(image)))
    assert digest_input([image, image]) != digest_input([image]) == digest_input(image)
    zeros = torch.zeros(2, 3)
    different = [digest_input(zeros), digest_input(zeros.T), digest_input(zeros.bfloat16()), digest_input(zeros + 1)]
    different.append(digest_input(zeros.to(torch.float8_e5m2)))
    assert len(set(different)) == 5


def test_lists_of_lists_are_digested_as_such():
    """One picture for each of two prompts is not two for both; what is alone in a list is what it is outside."""
    one, other = torch.zeros(3), torch.ones(3)
    assert digest_input([[one], [other]]) != digest_input([one, other])
    assert digest_input([[one, other]]) == digest_input([one, other])
    assert digest_input([[one]]) == digest_input(one)
    assert digest_input([[one, other], [one]]) != digest_input([[one], [other, one]])


def test_a_palette_is_digested_as_the_colours_that_are_seen():
    image = Image.fromarray(numpy.arange(48, dtype=numpy.uint8).reshape(4, 4, 3)).quantize(8)
    other = image.copy()
    other.putpalette(bytes(reversed(image.getpalette() or ())))
    clear = image.copy()
    clear.info["transparency"] = 0
    assert digest_input(image) == digest_input(image.convert("RGB"))
    assert len({digest_input(each) for each in (image, other, clear)}) == 3


def test_manifests_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        build().width = 1
