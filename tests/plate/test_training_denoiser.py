"""The denoiser's training: its data, its optimiser, and that a run can be broken off."""

import argparse
import dataclasses
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from calotype.core.attention.registry import attention_selector
from calotype.denoisers.plate import PlateDenoiserConfig
from calotype.language.model import LanguageModel
from calotype.language.tokenizer import load_tokenizer
from calotype.plate.training import courses, denoiser, muon
from calotype.plate.training.language import language_config
from calotype.plate.training.latents import Shard, write_shard
from calotype.plate.training.muon import Muon, orthogonalise
from calotype.plate.training.tokenizer import make_tokenizer

CONFIG = PlateDenoiserConfig(
    width=32, heads=2, layers=2, text_layers=1, hidden=48, time_width=16, rotary_axes=(4, 6, 6)
)
CAPTIONS = ("a fox", "a cat on a beach", "two apples", "a small bee at night", "a car", "a dog and a cat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run reads: an untrained language model and one shard of noise."""
    path = tmp_path_factory.mktemp("denoiser")
    torch.manual_seed(0)
    make_tokenizer(captions_per_kind=5).save(str(path / "tokenizer.json"))
    language = LanguageModel(language_config(), attention=attention_selector("reference"))
    save_file(
        {name: value.contiguous() for name, value in language.state_dict().items()}, path / "language.safetensors"
    )
    count = len(CAPTIONS)
    shard = Shard(
        latents=torch.randn(count, 8, 16, 16).half(),
        classes=torch.randint(121, (count, 8, 8), dtype=torch.uint8),
        captions=CAPTIONS,
    )
    write_shard(shard, path / "latents-0000.safetensors")
    return path


def _arguments(folder: Path, run: Path, **changes: object) -> argparse.Namespace:
    values: dict[str, object] = {
        "run": run,
        "latents": folder,
        "language": folder,
        "start": None,
        "steps": 2,
        "batch": 2,
        "part": 1,
        "shards": 1,
        "rate": 1e-3,
        "muon_rate": 1e-2,
        "decay": 0.6,
        "average": 0.9,
        "head_first": 1,
        "auxiliary": 0.1,
        "save_every": 1,
        "seed": 0,
        "threads": torch.get_num_threads(),
        "processes": 1,
        "port": 29501,
        "clips": None,
        "clip_shards": 1,
        "clip_batch": 2,
        "clip_part": 2,
        "clip_share": 0.5,
    }
    return argparse.Namespace(**(values | changes))


def test_a_broken_off_run_goes_on_bit_equal(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    denoiser.train(0, _arguments(folder, tmp_path / "whole"), CONFIG)
    save = denoiser.Run.save

    def broken_off(run: denoiser.Run, optimisers: list[tuple[torch.optim.Optimizer, float]]) -> None:
        save(run, optimisers)
        if run.step == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(denoiser.Run, "save", broken_off)
        with pytest.raises(KeyboardInterrupt):
            denoiser.train(0, _arguments(folder, tmp_path / "broken"), CONFIG)
    torch.manual_seed(99)
    denoiser.train(0, _arguments(folder, tmp_path / "broken"), CONFIG)
    for file in ("denoiser.safetensors", "state.safetensors"):
        whole, broken = (load_file(tmp_path / name / file) for name in ("whole", "broken"))
        assert whole.keys() == broken.keys()
        assert all(torch.equal(whole[name], broken[name]) for name in whole)
    trained = load_file(tmp_path / "whole" / "denoiser.safetensors")
    assert trained.keys() == denoiser.PlateDenoiser(CONFIG).state_dict().keys()


def test_pictures_and_clips_in_turns(folder: Path, tmp_path: Path) -> None:
    clips = tmp_path / "clips"
    clips.mkdir()
    shard = Shard(
        latents=torch.randn(3, 8, 5, 16, 16).half(),
        classes=torch.randint(121, (3, 5, 8, 8), dtype=torch.uint8),
        captions=("a fox moves left", "a cat grows", "a car spins at night"),
    )
    write_shard(shard, clips / "latents-0000.safetensors")
    denoiser.train(0, _arguments(folder, tmp_path / "pictures"), CONFIG)
    start, config = tmp_path / "pictures" / "denoiser.safetensors", dataclasses.replace(CONFIG, frames=5)
    denoiser.train(0, _arguments(folder, tmp_path / "both", start=start, clips=clips, average=0.0), config)
    before, after = load_file(start), load_file(tmp_path / "both" / "denoiser.safetensors")
    assert after.keys() == before.keys() | {"frame"}
    assert after["frame"].shape == (4, CONFIG.width)
    assert after["frame"].any(dim=1).all()


def test_tokens_that_are_left_out_are_not_there() -> None:
    """Slopes of the tokens that are kept, in any order, are those that a model gives which sees nothing else."""
    torch.manual_seed(0)
    trainee = denoiser.Trainee(dataclasses.replace(CONFIG, frames=2))
    x, sigma = torch.randn(2, 8, 2, 4, 4), torch.tensor([0.3, 0.8])
    told = (sigma, torch.randn(2, 3, CONFIG.text_width), torch.tensor([3, 2]))
    whole, scores = trainee(x, *told)
    order = torch.randperm(8).expand(2, 8)
    slopes, in_order = trainee(x, *told, order)
    torch.testing.assert_close(slopes, denoiser.chosen(whole, order))
    torch.testing.assert_close(in_order, denoiser.chosen(scores, order))

    kept = torch.tensor([[5, 0], [2, 7]])
    slopes, _ = trainee(x, *told, kept)
    others = torch.ones(2, 1, 2, 4, 4)
    for row, tokens in enumerate(kept):
        for token in tokens:
            frame, height, width = int(token) // 4, 2 * (int(token) % 4 // 2), 2 * (int(token) % 2)
            others[row, :, frame, height : height + 2, width : width + 2] = 0
    unseen, _ = trainee(x + others * torch.randn_like(x), *told, kept)
    torch.testing.assert_close(unseen, slopes)
    assert not torch.allclose(slopes, denoiser.chosen(whole, kept))


def test_tokens_of_objects_are_kept_more_often() -> None:
    classes = torch.full((1, 320), 120)
    classes[:, :80] = 7
    generator = torch.Generator().manual_seed(0)
    kept = torch.cat([denoiser.random_tokens(classes, 120, 0.5, generator) for _ in range(50)])
    assert kept.shape == (50, 160) and all(len(set(row.tolist())) == 160 for row in kept)
    share = (kept < 80).sum() / (50 * 80)
    assert 0.8 < share < 0.95
    assert (kept >= 80).any(dim=1).all()


def test_courses_go_on_where_they_stood(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    arguments = _arguments(folder, tmp_path, clips=folder)
    taken: list[tuple[int, list[int]]] = []
    whole = courses.courses_of(arguments, tokenizer, 0)
    for step in range(6):
        taken.append((step, next(whole[step % 2].stream)))
    for start in range(1, 6):
        again = courses.courses_of(arguments, tokenizer, start)
        for step, rows in taken[start:]:
            assert next(again[step % 2].stream) == rows


def test_batches_go_on_anywhere_and_cover_the_data() -> None:
    data = courses.Data(
        latents=torch.zeros(10, 1), classes=torch.zeros(10, 1), ids=[[1] * (1 + n % 4) for n in range(10)]
    )
    whole = list(islice(courses.batches(data, 2, seed=3, first=0), 12))
    assert sorted(row for batch in whole[:5] for row in batch) == list(range(10))
    assert whole[:5] != whole[5:10]
    for first in range(12):
        assert list(islice(courses.batches(data, 2, seed=3, first=first), 12 - first)) == whole[first:]


def test_prompts_have_marks_and_fit(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    ids = courses.prompt_ids(tokenizer, "a fox " * 40)
    assert len(ids) == courses.MAX_TOKENS
    assert (ids[0], ids[-1]) == (tokenizer.special.bos, tokenizer.special.eos)


def test_no_latents_is_an_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no latents"):
        courses.load_data(tmp_path, load_tokenizer(folder / "tokenizer.json"), 1)


def test_muon_updates_each_part_as_a_matrix_of_its_own() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(6, 4))
    untouched = torch.nn.Parameter(torch.zeros(2, 2))
    optimiser = Muon([weight, untouched], [3, 1], lr=0.1)
    weight.grad = torch.randn(6, 4)
    optimiser.step()
    gradient = 1.95 * weight.grad  # Nesterov: the gradient and momentum times it
    for rows, part in zip(weight.detach().chunk(3), gradient.chunk(3), strict=True):
        assert torch.allclose(rows, -0.1 * orthogonalise(part), atol=1e-6)
    assert not untouched.any()


@pytest.mark.parametrize("shape", [(8, 3), (3, 8)])
def test_orthogonal_means_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
    assert (values > 0.6).all()
    assert (values < 1.3).all()


def muon_weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((12, 4), (4, 8), (8, 4))]
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    return weights


def test_two_processes_that_share_muons_work_take_the_step_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[list[torch.Tensor]] = []
    monkeypatch.setattr(muon, "sum_over_processes", lambda steps: shares.append([s.clone() for s in steps]))
    for rank in (0, 1):
        Muon(muon_weights(), [3, 1, 2], lr=0.1, rank=rank, processes=2).step()
    alone, before = muon_weights(), muon_weights()
    Muon(alone, [3, 1, 2], lr=0.1).step()
    for first, second, after, start in zip(*shares, alone, before, strict=True):
        assert torch.equal(start.detach().add(first + second, alpha=-0.1), after.detach())
    assert all(any(share.any() for share in part) for part in shares)
