"""A run against diffusers', stage by stage."""

import copy
import dataclasses
import math

import pytest
import torch

import calotype
from calotype.denoisers.patches import patchify
from calotype.encoders.base import LimitedEncoder
from calotype.pipelines import families
from calotype.pipelines.compare import (
    Run,
    Stage,
    adapter_of,
    arguments_of,
    compare,
    compare_folder,
    difference,
    differences,
    first_divergence,
    trace_ours,
    trace_theirs,
)

from ..tiny_families import FAMILIES, SIZE, SIZES

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
    return differences(trace_ours(ours, RUN, asked(ours)), theirs)


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
