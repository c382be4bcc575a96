"""Two experts in one run, against the rule of diffusers' pipelines."""

import pytest
import tiny_wan
import torch
from parity import error

from calotype.core.attention.registry import attention_selector
from calotype.core.loading import build_on_meta
from calotype.core.weight_source import WeightSource
from calotype.denoisers.base import Conditioning
from calotype.denoisers.experts import Experts
from calotype.denoisers.guidance import Run, prepare_both
from calotype.denoisers.wan import WanDenoiser
from calotype.denoisers.wan_config import WanConfig
from calotype.denoisers.wan_keys import wan_key_map
from calotype.schedulers.base import Point

TIMES = (1.0, 0.9, 0.875, float(torch.tensor(0.6)), 0.4)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """Both of ours, and both of theirs."""
    theirs = [tiny_wan.wan_transformer(seed=seed) for seed in (3, 4)]
    folders = [tmp_path_factory.mktemp("wan") for _ in theirs]
    for each, folder in zip(theirs, folders, strict=True):
        each.save_pretrained(folder)
    return [loaded(each, folder) for each, folder in zip(theirs, folders, strict=True)], theirs


def loaded(theirs, folder, block_device="cpu"):
    """What loading makes of a folder; on the meta device, blocks stay in their file."""
    ours = build_on_meta(lambda: WanDenoiser(WanConfig.from_entries(dict(theirs.config))))
    source = WeightSource.for_module(ours, folder / "diffusion_pytorch_model.safetensors", wan_key_map())
    ours.fill(source, device=torch.device("cpu"), dtype=torch.float32, block_device=torch.device(block_device))
    return ours


def told_and_latents():
    generator = torch.Generator().manual_seed(5)
    states, x = torch.randn(1, 512, 20, generator=generator), torch.randn(1, 4, 2, 4, 6, generator=generator)
    return Conditioning(states=states, lengths=torch.tensor([512])), x


def points_at(*times):
    return [Point(index=2 + i, sigma=time, alpha=1 - time, time=time) for i, time in enumerate(times)]


@pytest.mark.parametrize("boundary", [0.0, 0.5, 0.6, 0.7, 0.875, 0.9, 0.95, 1.0])
def test_each_time_has_its_expert(experts, boundary):
    (high, low), (their_high, their_low) = experts
    model = Experts(high=high, low=low, boundary=boundary)
    points, (told, x) = points_at(*TIMES), told_and_latents()
    prepared = model.prepare(told, tuple(x.shape), points, attention=attention_selector())
    for point in points:
        t = torch.tensor(1000 * point.time)
        their_expert = their_high if t >= boundary * 1000 else their_low
        wanted = their_expert(x, timestep=t[None], encoder_hidden_states=told.states, return_dict=False)[0]
        assert error(model.slope(x, prepared, point), wanted) < 1e-5


def test_an_expert_that_no_point_asks_for_prepares_nothing(experts):
    (high, _), _ = experts
    nobody = build_on_meta(lambda: WanDenoiser(high.config))
    told = Conditioning(states=torch.zeros(1, 1, 20), lengths=torch.tensor([1]))
    prepared = Experts(high=high, low=nobody, boundary=0.5).prepare(
        told, (1, 4, 1, 4, 4), points_at(0.9, 0.5), attention=attention_selector()
    )
    assert {expert for expert, _ in prepared.turns.values()} == {high}


def test_both_sides_of_guidance_share_what_each_expert_prepares(experts):
    """Bit-equal to preparing each alone."""
    (high, low), _ = experts
    model = Experts(high=high, low=low, boundary=0.5)
    told, x = told_and_latents()
    other = Conditioning(states=told.states.flip(1), lengths=told.lengths)
    points = points_at(0.8, 0.2)
    run = Run(shape=tuple(x.shape), evaluations=points, attention=attention_selector())
    first, second = prepare_both(model, told, other, run)
    for point in points:
        expert, prepared = second.turns[point.index]
        assert expert is model.expert(point)
        assert prepared.tables is first.turns[point.index][1].tables
        for each, both in ((told, first), (other, second)):
            alone = model.prepare(each, run.shape, points, attention=run.attention)
            assert torch.equal(model.slope(x, both, point), model.slope(x, alone, point))


def test_each_experts_blocks_may_stay_in_its_file(experts, tmp_path):
    """Bit-equal to experts that are in memory."""
    resident, theirs = experts
    lean: list[WanDenoiser] = []
    for i, each in enumerate(theirs):
        each.save_pretrained(tmp_path / str(i))
        lean.append(loaded(each, tmp_path / str(i), "meta"))
    assert all(weight.is_meta for each in lean for weight in each.blocks.parameters())
    points, (told, x) = points_at(0.8, 0.2), told_and_latents()
    runs: list[list[torch.Tensor]] = []
    for high, low in (resident, lean):
        model = Experts(high=high, low=low, boundary=0.5)
        prepared = model.prepare(told, tuple(x.shape), points, attention=attention_selector())
        runs.append([model.slope(x, prepared, point) for point in points])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    assert error(*runs[0]) > 1e-2


@pytest.mark.parametrize("boundary", [-0.1, 1.5, float("nan")])
def test_boundaries_are_times(experts, boundary):
    (high, low), _ = experts
    with pytest.raises(ValueError, match="from 0 to 1"):
        Experts(high=high, low=low, boundary=boundary)
