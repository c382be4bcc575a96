import dataclasses

import pytest
import torch

from calotype.denoisers.base import Conditioning, Prompt


def conditioning(lengths: list[int], width: int = 3) -> Conditioning:
    generator = torch.Generator().manual_seed(sum(lengths))
    states = torch.randn(len(lengths), max(lengths), width, generator=generator)
    return Conditioning(states=states, lengths=torch.tensor(lengths))


def test_rows_pick_and_repeat():
    picked = conditioning([2, 4, 1]).rows([2, 0, 0])
    assert picked.lengths.tolist() == [1, 2, 2]
    assert torch.equal(picked.states[1], conditioning([2, 4, 1]).states[0])
    assert torch.equal(picked.states[1], picked.states[2])


def test_concatenate_pads_to_the_longest():
    a, b = conditioning([2]), conditioning([3, 5])
    both = Conditioning.concatenate((a, b))
    assert both.states.shape == (3, 5, 3)
    assert both.lengths.tolist() == [2, 3, 5]
    assert torch.equal(both.states[0, :2], a.states[0])
    assert not both.states[0, 2:].any()


def test_concatenate_takes_one_width():
    a, b = (Conditioning(states=torch.zeros(1, 2, width), lengths=torch.tensor([2])) for width in (3, 4))
    with pytest.raises(ValueError, match="different kinds cannot be joined: widths of states"):
        Conditioning.concatenate((a, b))


def test_concatenate_keeps_each_warning_once():
    a = Conditioning(states=torch.zeros(1, 1, 1), lengths=torch.ones(1, dtype=torch.int64), warnings=("cut", "odd"))
    assert Conditioning.concatenate((a, a.rows([0]))).warnings == ("cut", "odd")


def test_picture_states_go_with_their_rows():
    states = torch.arange(12.0).view(2, 2, 3)
    told = dataclasses.replace(conditioning([2, 4]), picture_states=states)
    assert torch.equal(told.rows([1, 1]).picture_states, states[[1, 1]])
    assert torch.equal(Conditioning.concatenate((told, told.rows([0]))).picture_states, states[[0, 1, 0]])
    assert told.to(torch.device("cpu"), torch.bfloat16).picture_states.dtype is torch.bfloat16
    for other in (conditioning([2]), dataclasses.replace(told, picture_states=states[:, :1])):
        with pytest.raises(ValueError, match="different kinds"):
            Conditioning.concatenate((told, other))


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"\(1, 2, 3\).*\(2,\)"):
        Conditioning(states=torch.zeros(1, 2, 3), lengths=torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"picture_states of shape \(2, 3\)"):
        dataclasses.replace(conditioning([1, 2]), picture_states=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="2 positive and 1 negative"):
        Prompt(positive=conditioning([1, 2]), negative=conditioning([1]))


def test_prompt_rows_and_dtype():
    prompt = Prompt(positive=conditioning([1, 2]), negative=conditioning([2, 2])).rows([1])
    assert prompt.positive.num_rows == 1
    assert prompt.negative is not None and prompt.negative.num_rows == 1
    assert Prompt(positive=conditioning([1])).rows([0, 0]).negative is None
    assert conditioning([1]).to(torch.device("cpu"), torch.bfloat16).states.dtype is torch.bfloat16
