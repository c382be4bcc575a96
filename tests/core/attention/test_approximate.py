"""Approximations: exact where they see everything, and what they leave out where they do not."""

import pytest
import torch

from calotype.core.attention.approximate import BlockedAttention, SlidingTileAttention
from calotype.core.attention.base import AttentionCall, AttentionMask
from calotype.core.attention.reference import ReferenceAttention
from calotype.core.attention.registry import attention_selector

GRID = (5, 6, 7)


def call_of(grid=GRID, dtype=torch.float32, others=0, **mask):
    generator = torch.Generator().manual_seed(0)
    tokens = grid[0] * grid[1] * grid[2] + others
    queries, keys, values = (torch.randn(2, 3, tokens, 8, generator=generator).to(dtype) for _ in range(3))
    told = AttentionMask(grid=grid, **mask)
    return AttentionCall(queries=queries, keys=keys, values=values, mask=told, scale=0.4)


LENGTHS = torch.tensor([213, 216])  # of 210 tokens of the clip, and of 6 others


@pytest.mark.parametrize(("tile", "window"), [((2, 2, 2), (3, 3, 4)), ((5, 6, 7), (1, 1, 1)), ((1, 4, 3), (9, 9, 9))])
@pytest.mark.parametrize("more", [{}, {"others": 6}, {"others": 6, "key_lengths": LENGTHS}])
def test_a_window_as_large_as_the_clip_is_exact(tile, window, more):
    call = call_of(**more)
    found = SlidingTileAttention(tile=tile, window=window)(call)
    torch.testing.assert_close(found, ReferenceAttention()(call), atol=1e-6, rtol=1e-5)


def seen(grid, tile, window):
    """By token, the tokens that it sees, told one axis at a time."""
    axes = []
    for length, size, count in zip(grid, tile, window, strict=True):
        tiles = -(-length // size)
        rows = []
        for place in range(length):
            first = place // size - count // 2
            first = max(0, min(first, tiles - count))
            rows.append([first * size <= other < (first + count) * size for other in range(length)])
        axes.append(torch.tensor(rows))
    t, y, x = axes
    whole = t[:, None, None, :, None, None] & y[None, :, None, None, :, None] & x[None, None, :, None, None, :]
    return whole.reshape(grid[0] * grid[1] * grid[2], -1)


@pytest.mark.parametrize(("tile", "window"), [((2, 2, 3), (1, 1, 1)), ((1, 2, 2), (3, 1, 3)), ((2, 3, 2), (2, 2, 2))])
@pytest.mark.parametrize("more", [{}, {"others": 6}, {"others": 6, "key_lengths": LENGTHS}])
def test_tokens_see_the_tiles_around_their_own(tile, window, more):
    """Others, which come after the clip's, are seen by all as far as a row has them, and see all."""
    call, backend, others = call_of(**more), SlidingTileAttention(tile=tile, window=window), more.get("others", 0)
    mask = torch.ones(210 + others, 210 + others, dtype=torch.bool)
    mask[:210, :210] = seen(GRID, tile, window)
    assert backend.share(GRID, others) == pytest.approx(mask.float().mean().item())
    if "key_lengths" in more:
        mask = mask & (torch.arange(216) < LENGTHS[:, None])[:, None, None]
    scores = (call.queries * call.scale @ call.keys.mT).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(backend(call), scores.softmax(-1) @ call.values, atol=1e-6, rtol=1e-5)


def test_what_it_does_not_take_goes_to_the_exact_ones():
    selector = attention_selector("sliding_tile")
    assert selector.choose(call_of()).name == "sliding_tile"
    plain = call_of()
    text = AttentionCall(queries=plain.queries, keys=plain.keys[:, :, :9], values=plain.values[:, :, :9], scale=0.4)
    assert selector.choose(text).name == "sdpa"
    assert selector.choose(call_of(causal=True)).name == "sdpa"
    assert selector.choose(call_of(others=6, causal=True)).name == "sdpa"
    assert selector.choose(call_of(key_lengths=torch.tensor([9, 210]))).name == "sdpa"
    assert selector.choose(call_of(others=6, key_lengths=LENGTHS)).name == "sliding_tile"
    assert attention_selector().choose(call_of()).name == "sdpa"
    own = attention_selector(SlidingTileAttention(tile=(1, 1, 1), window=(1, 1, 1)))
    assert own.choose(call_of()).name == "sliding_tile"
    torch.testing.assert_close(own(call_of()), call_of().values)  # each token sees itself


@pytest.mark.parametrize("wrong", [{"tile": (0, 1, 1)}, {"window": (1, 1)}])
def test_wrong_sizes(wrong):
    with pytest.raises(ValueError, match=r"is \(.*\); it must be three numbers of at least 1"):
        SlidingTileAttention(**wrong)


@pytest.mark.parametrize("block", [7, 64, 1000])
def test_blocks_of_bfloat16_scores(block):
    call, backend = call_of(dtype=torch.bfloat16), BlockedAttention(block=block)
    exact = ReferenceAttention()(call).float()
    error = (backend(call).float() - exact).norm() / exact.norm()
    assert 0 < error < 0.02
    assert attention_selector("blocked_bfloat16").choose(call).name == "blocked_bfloat16"
    assert attention_selector("blocked_bfloat16").choose(call_of()).name == "sdpa"


def test_names_are_told():
    with pytest.raises(ValueError, match=r"'slow'; it must be one of reference, sdpa, .*sliding_tile"):
        attention_selector("slow")
