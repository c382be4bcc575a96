"""What a mask says, and which masks are refused."""

import pytest
import torch

from calotype.core.attention.base import FULL, AttentionMask

CPU = torch.device("cpu")


def rows(mask: AttentionMask, num_queries: int, num_keys: int) -> list[list[str]]:
    dense = mask.dense(num_queries, num_keys, CPU)
    assert dense is not None
    return [["".join("x" if seen else "." for seen in query) for query in row[0].tolist()] for row in dense]


def test_causal_masks() -> None:
    assert rows(AttentionMask(causal=True), 3, 4) == [["x...", "xx..", "xxx."]]
    assert rows(AttentionMask(causal=True, query_offset=1), 2, 4) == [["xx..", "xxx."]]
    offsets = torch.tensor([0, 2])
    assert rows(AttentionMask(causal=True, query_offset=offsets), 2, 4) == [["x...", "xx.."], ["xxx.", "xxxx"]]


def test_key_lengths_add_to_the_causal_mask() -> None:
    lengths = torch.tensor([1, 3])
    assert rows(AttentionMask(key_lengths=lengths), 2, 3) == [["x.."], ["xxx"]]
    assert rows(AttentionMask(causal=True, key_lengths=lengths), 2, 3) == [["x..", "x.."], ["x..", "xx."]]


def test_windows_hide_what_is_long_past() -> None:
    assert rows(AttentionMask(causal=True, window=2), 4, 4) == [["x...", "xx..", ".xx.", "..xx"]]
    assert rows(AttentionMask(causal=True, query_offset=3, window=3), 1, 4) == [[".xxx"]]
    assert rows(AttentionMask(causal=True, window=1), 2, 3) == [["x..", ".x."]]
    offsets = torch.tensor([0, 2])
    assert rows(AttentionMask(causal=True, query_offset=offsets, window=2), 1, 4) == [["x..."], [".xx."]]
    lengths = torch.tensor([2, 3])
    mask = AttentionMask(causal=True, window=2, key_lengths=lengths)
    assert rows(mask, 3, 3) == [["x..", "xx.", ".x."], ["x..", "xx.", ".xx"]]


def test_a_window_that_hides_nothing_is_no_mask() -> None:
    assert AttentionMask(causal=True, query_offset=3, window=4).dense(1, 4, CPU) is None
    assert AttentionMask(causal=True, query_offset=3, window=3).dense(1, 4, CPU) is not None


def test_nothing_masked_is_none() -> None:
    assert FULL.is_full
    assert FULL.dense(3, 4, CPU) is None
    assert AttentionMask(causal=True, query_offset=3).dense(1, 4, CPU) is None
    assert AttentionMask(causal=True, query_offset=2).dense(2, 4, CPU) is not None


def test_the_dense_mask_is_built_once() -> None:
    mask = AttentionMask(causal=True)
    assert mask.dense(3, 4, CPU) is mask.dense(3, 4, CPU)


def test_what_is_added_to_scores_is_built_once_for_each_format() -> None:
    mask = AttentionMask(causal=True)
    for dtype in (torch.float32, torch.bfloat16):
        bias = mask.bias(2, 3, dtype, CPU)
        assert bias is not None and bias.dtype == dtype and bias is mask.bias(2, 3, dtype, CPU)
        assert bias.tolist() == [[[[0, -torch.inf, -torch.inf], [0, 0, -torch.inf]]]]
    assert FULL.bias(2, 3, torch.float32, CPU) is None


@pytest.mark.parametrize(
    ("mask", "num_queries", "num_keys", "expected"),
    [
        (AttentionMask(causal=True), 4, 4, True),
        (AttentionMask(causal=True, query_offset=2), 2, 4, True),
        (AttentionMask(causal=True), 3, 4, False),
        (AttentionMask(causal=True, key_lengths=torch.tensor([4])), 4, 4, False),
        (AttentionMask(causal=True, query_offset=torch.tensor([0])), 4, 4, False),
        (AttentionMask(causal=True, window=4), 4, 4, True),
        (AttentionMask(causal=True, window=3), 4, 4, False),
        (FULL, 4, 4, False),
    ],
)
def test_is_causal_at_end(mask: AttentionMask, num_queries: int, num_keys: int, expected: bool) -> None:
    assert mask.is_causal_at_end(num_queries, num_keys) == expected


def test_impossible_masks_are_refused() -> None:
    with pytest.raises(ValueError, match="query_offset is -1"):
        AttentionMask(causal=True, query_offset=-1)
    with pytest.raises(ValueError, match="window is 0; it must be at least 1"):
        AttentionMask(causal=True, window=0)
    with pytest.raises(ValueError, match="window is 4; it must be at least 1, and the mask causal"):
        AttentionMask(window=4)
    with pytest.raises(ValueError, match=r"key_lengths has shape \[2, 1\]"):
        AttentionMask(key_lengths=torch.tensor([[1], [2]]))
    with pytest.raises(ValueError, match=r"query_offset has shape \[1\] and torch.float32"):
        AttentionMask(causal=True, query_offset=torch.tensor([1.0]))
