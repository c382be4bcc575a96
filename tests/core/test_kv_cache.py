"""The key/value cache: chunks equal the whole, ragged rows equal single rows, and misuse is refused."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from calotype.core.attention.base import AttentionMask
from calotype.core.attention.registry import attention_selector
from calotype.core.blocks.decoder import DecoderBlock, DecoderConfig
from calotype.core.kv_cache import ContiguousKVCache
from calotype.core.rotary import RotaryConfig, rotary_table
from calotype.core.stream import BlockInputs, Cache, NoCache, Stream, run_blocks

WIDTH, HEAD, LAYERS = 12, 8, 2
ROTARY = RotaryConfig(axes=(HEAD,), pairing="half")


@pytest.fixture(scope="module")
def blocks() -> list[DecoderBlock]:
    torch.manual_seed(3)
    config = DecoderConfig(width=WIDTH, heads=4, kv_heads=2, head_width=HEAD, hidden=16, qk_norm=True)
    return [DecoderBlock(config) for _ in range(LAYERS)]


def make_cache(batch: int, capacity: int = 12) -> ContiguousKVCache:
    return ContiguousKVCache(layers=LAYERS, batch=batch, kv_heads=2, head_width=HEAD, capacity=capacity)


@torch.no_grad()
def run(blocks: Sequence[DecoderBlock], x: Tensor, positions: Tensor, mask: AttentionMask, cache: Cache) -> Tensor:
    prepared = BlockInputs(rotary=rotary_table(ROTARY, positions), mask=mask, attention=attention_selector())
    return run_blocks(list(blocks), Stream(x=x), prepared, cache).x


def whole(blocks: Sequence[DecoderBlock], x: Tensor) -> Tensor:
    return run(blocks, x, torch.arange(x.shape[1])[:, None], AttentionMask(causal=True), NoCache())


def step(
    blocks: Sequence[DecoderBlock], x: Tensor, cache: ContiguousKVCache, counts: Sequence[int] | None = None
) -> Tensor:
    out = run(blocks, x, cache.positions(x.shape[1]), cache.mask(), cache)
    cache.advance(torch.tensor(counts) if counts is not None else torch.full((len(x),), x.shape[1]))
    return out


@pytest.mark.parametrize("chunks", [(9,), (4, 5), (1,) * 9, (6, 1, 2)])
def test_chunks_equal_the_whole(blocks: list[DecoderBlock], chunks: tuple[int, ...]) -> None:
    x, cache = torch.randn(2, 9, WIDTH), make_cache(2)
    parts = [step(blocks, part, cache) for part in x.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole(blocks, x), rtol=1e-5, atol=1e-5)
    assert cache.lengths.tolist() == [9, 9]
    assert cache.lengths.dtype == torch.int64


def test_ragged_rows_equal_single_rows(blocks: list[DecoderBlock]) -> None:
    """Prompts of 5, 2 and 3 tokens, padded with noise; then steps of 1, 2 (padded), and 1 in which row 1 rests."""
    x = torch.randn(3, 9, WIDTH)
    cache, done = make_cache(3), [0, 0, 0]
    results: list[list[Tensor]] = [[], [], []]
    for num_new, counts in ((5, [5, 2, 3]), (1, [1, 1, 1]), (2, [1, 2, 2]), (1, [1, 0, 1]), (1, [1, 1, 1])):
        new = 100 * torch.randn(3, num_new, WIDTH)
        for b, count in enumerate(counts):
            new[b, :count] = x[b, done[b] : done[b] + count]
        out = step(blocks, new, cache, counts)
        for b, count in enumerate(counts):
            results[b].append(out[b, :count])
            done[b] += count
    assert cache.lengths.tolist() == done == [9, 6, 8]
    for b, length in enumerate(done):
        expected = whole(blocks, x[b : b + 1, :length])[0]
        torch.testing.assert_close(torch.cat(results[b]), expected, rtol=1e-5, atol=1e-5)


def test_a_failed_neighbour_leaves_nothing_after_reset(blocks: list[DecoderBlock]) -> None:
    x, cache = torch.randn(2, 4, WIDTH), make_cache(2)
    step(blocks, torch.full((2, 6, WIDTH), torch.nan), cache)
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]
    assert torch.equal(step(blocks, x, cache, [4, 2]), step(blocks, x, make_cache(2), [4, 2]))
    assert bool(step(blocks, x[:, :1], cache).isfinite().all())


def test_update_gives_views_of_what_was_written_and_leaves_its_arguments() -> None:
    cache = ContiguousKVCache(layers=2, batch=1, kv_heads=1, head_width=2, capacity=4)
    keys, values = torch.tensor([[[[1.0, 2], [3, 4]]]]), torch.tensor([[[[5.0, 6], [7, 8]]]])
    for _ in range(2):  # nothing counts before `advance`
        all_keys, all_values = cache.update(1, keys, values)
    cache.advance([1])
    assert all_keys.tolist() == [[[[1, 2], [3, 4]]]]
    assert all_values.tolist() == [[[[5, 6], [7, 8]]]]
    all_keys, _ = cache.update(1, keys[:, :, 1:], values[:, :, 1:])
    assert all_keys.tolist() == [[[[1, 2], [3, 4]]]]
    other, _ = cache.update(0, values, keys)
    assert other.tolist() == [[[[0, 0], [5, 6], [7, 8]]]]
    assert keys.tolist() == [[[[1, 2], [3, 4]]]]
    assert values.tolist() == [[[[5, 6], [7, 8]]]]


def test_positions_and_masks() -> None:
    cache = ContiguousKVCache(layers=1, batch=2, kv_heads=1, head_width=2, capacity=8)
    assert cache.positions(2).tolist() == [[[0], [1]], [[0], [1]]]
    assert cache.mask().is_causal_at_end(3, 3)
    new = torch.zeros(2, 1, 3, 2)
    cache.update(0, new, new)
    held = cache.lengths
    cache.advance(torch.tensor([3, 1]))
    assert held.tolist() == [0, 0]
    assert cache.positions(2).tolist() == [[[3], [4]], [[1], [2]]]
    offset = cache.mask().query_offset
    assert isinstance(offset, Tensor)
    assert offset.tolist() == [3, 1]
    cache.update(0, new, new)
    cache.advance([0, 2])
    assert cache.mask().query_offset == 3


def test_gradients_stop_at_the_cache() -> None:
    cache = ContiguousKVCache(layers=1, batch=1, kv_heads=1, head_width=2, capacity=8)
    new = torch.ones(1, 1, 3, 2, requires_grad=True)
    keys, _ = cache.update(0, new, new)
    assert not keys.requires_grad


def test_bytes() -> None:
    cache = ContiguousKVCache(layers=3, batch=2, kv_heads=5, head_width=4, capacity=7, dtype=torch.bfloat16)
    assert cache.bytes == 3 * 2 * (2 * 5 * 7 * 4) * 2


def test_misuse_is_refused_with_numbers() -> None:
    cache = ContiguousKVCache(layers=1, batch=2, kv_heads=1, head_width=2, capacity=4)
    new = torch.zeros(2, 1, 3, 2)
    cache.update(0, new, new)
    with pytest.raises(ValueError, match=r"counts are \[4, 0\]; each must be from 0 to the 3 tokens just written"):
        cache.advance([4, 0])
    with pytest.raises(ValueError, match=r"counts are \[-1, 0\]"):
        cache.advance([-1, 0])
    with pytest.raises(ValueError, match="1 counts for a cache of 2 rows"):
        cache.advance([1])
    cache.advance([3, 1])
    with pytest.raises(ValueError, match=r"3 cached \+ 2 new tokens exceed the cache's capacity of 4"):
        cache.update(0, new[:, :, :2], new[:, :, :2])
    with pytest.raises(ValueError, match=r"values are \[1, 1, 1, 2\]; the cache takes \[2, 1, 1, 2\]"):
        cache.update(0, new[:, :, :1], new[:1, :, :1])
    with pytest.raises(ValueError, match=r"keys are torch.bfloat16; the cache keeps torch.float32"):
        cache.update(0, new[:, :, :1].bfloat16(), new[:, :, :1].bfloat16())
    with pytest.raises(ValueError, match="capacity is 0; it must be at least 1"):
        ContiguousKVCache(layers=1, batch=1, kv_heads=1, head_width=1, capacity=0)
