"""Every family that has blocks, with weights that stay in their files: the same bits, and less in memory."""

import gc
import json
import threading
import weakref

import pytest
import torch

import calotype
from calotype.core.offload import StoredBlocks
from calotype.core.weight_source import WeightSource
from calotype.denoisers.hoisting import HoistingModule
from calotype.encoders.base import LimitedEncoder
from calotype.pipelines.finite import NonFiniteError

from ..tiny_families import FAMILIES, SIZE, SIZES

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory):
    """A folder, and the size of pictures."""
    folder = tmp_path_factory.mktemp("offload") / request.param
    FAMILIES[request.param](folder)
    height, width = SIZES.get(request.param, SIZE)
    size = {"height": height, "width": width}
    return folder, {**size, "num_inference_steps": 2, "max_sequence_length": 24, "output_type": "latent"}


def latents(pipe, arguments, seed=3):
    prompts = ["a photo of a red fox", "two dogs"]
    return pipe(prompts, negative_prompt=["a cat", ""], seed=seed, progress=False, **arguments).latents


def modules(pipe):
    """The text encoders' networks."""
    fields = ("model", "language_model")
    return [vars(encoder)[name] for encoder in pipe.encoders.values() for name in fields if name in vars(encoder)]


def resident_bytes(module):
    return sum(parameter.nbytes for parameter in module.parameters() if not parameter.is_meta)


def test_results_are_bit_equal_and_weights_stay_away(family):
    folder, arguments = family
    whole = calotype.load(folder, offload="none")
    expected = latents(whole, arguments)
    lean = calotype.load(folder, offload="encoders")
    assert torch.equal(latents(lean, arguments), expected)
    assert all(resident_bytes(module) == 0 for module in modules(lean))
    assert len(modules(lean)) == len(lean.encoders)
    leanest = calotype.load(folder, offload="blocks")
    assert torch.equal(latents(leanest, arguments), expected)
    assert all(resident_bytes(module) == 0 for module in modules(leanest))
    denoiser = leanest.denoiser
    assert isinstance(denoiser, HoistingModule)
    walked = [denoiser.get_submodule(name) for name in denoiser.walked]
    assert sum(map(len, walked)) >= 2
    assert all(resident_bytes(blocks) == 0 for blocks in walked)
    away = sum(resident_bytes(whole.denoiser.get_submodule(name)) for name in denoiser.walked)
    assert resident_bytes(denoiser) == resident_bytes(whole.denoiser) - away


def test_encoders_are_read_once_for_both_sides(family, monkeypatch):
    """Of a guided run: each weight once, not once for the prompt and again for what to stay away from."""
    folder, arguments = family
    names = ("height", "width", "max_sequence_length")
    request = calotype.Request(
        prompt="a red fox",
        negative_prompt="a cat",
        guidance=calotype.ClassifierFree(2.0),
        **{name: arguments[name] for name in names},
    )
    expected, found = calotype.load(folder).encode(request).conditioning, []
    read = WeightSource.read

    def counted(source, name, **how):
        found.append((id(source), name))
        return read(source, name, **how)

    pipe = calotype.load(folder, offload="encoders")
    monkeypatch.setattr(WeightSource, "read", counted)
    conditioning = pipe.encode(request).conditioning
    assert found
    assert len(set(found)) == len(found)
    assert torch.equal(conditioning.positive.states, expected.positive.states)
    assert torch.equal(conditioning.negative.states, expected.negative.states)


def test_two_runs_at_once(family):
    folder, arguments = family
    pipe, found = calotype.load(folder, offload="blocks"), {}
    expected = {seed: latents(pipe, arguments, seed) for seed in (3, 40)}
    threads = [
        threading.Thread(target=lambda seed=seed: found.update({seed: latents(pipe, arguments, seed)}))
        for seed in expected
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], expected[seed]) for seed in expected)


def test_encoders_are_let_go(family):
    """By reference counts alone, before the call returns."""
    folder, _ = family
    pipe = calotype.load(folder, offload="encoders")
    for each in pipe.encoders.values():
        encoder = each.with_max_tokens(24) if isinstance(each, LimitedEncoder) else each
        gc.collect()
        gc.disable()
        try:
            filled = encoder.resident()
            assert filled.resident() is filled
            assert torch.equal(filled(["a cat"]).states, encoder(["a cat"]).states)
            (network,) = modules_of(filled)
            weight = weakref.ref(next(network.parameters()))
            assert not weight().is_meta
            del filled, network
            assert weight() is None
        finally:
            gc.enable()


def modules_of(encoder):
    return [value for value in vars(encoder).values() if isinstance(value, torch.nn.Module)]


def test_another_dtype_is_read_from_the_same_files(family):
    folder, arguments = family
    expected = latents(calotype.load(folder, dtype="bfloat16"), arguments)
    for moved in (
        calotype.load(folder, dtype="bfloat16", offload="blocks"),
        calotype.load(folder, offload="blocks").to(dtype="bfloat16"),
    ):
        assert torch.equal(latents(moved, arguments), expected)
        assert sum(map(resident_bytes, modules(moved))) == 0


def test_a_block_that_goes_wrong_is_named(family):
    """The check of each block stands around the reading."""
    folder, arguments = family
    pipe = calotype.load(folder, offload="blocks")
    source = pipe.denoiser.source

    class Broken:
        def read(self, name, **how):
            value = source.read(name, **how)
            return value * float("nan") if name.startswith("blocks.1.") else value

        def __getattr__(self, name):
            return getattr(source, name)

    pipe.denoiser.source = Broken()
    with pytest.raises(NonFiniteError, match="block 1 of"):
        latents(pipe, arguments)


def test_runners_are_wrapped_where_need_be_alone(family):
    folder, _ = family

    def then(blocks, stream, prepared, cache):
        return stream

    assert calotype.load(folder).denoiser.runner(then) is then
    wrapped = calotype.load(folder, offload="blocks").denoiser.runner(then)
    assert isinstance(wrapped, StoredBlocks)
    assert wrapped.then is then


@pytest.mark.parametrize(
    ("kind", "offload", "message"),
    [
        ("FluxPipeline", "disk", "offload is 'disk'; it must be one of none, encoders, blocks"),
        ("StableDiffusionXLPipeline", "blocks", "a UNet has none.*takes 'encoders'"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_read(tmp_path, kind, offload, message):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    with pytest.raises(ValueError, match=message):
        calotype.load(tmp_path, offload=offload)
