"""Contiguous, ring and layered caches: room, growth, forgetting."""

import pytest
import torch
from torch import Tensor

from calotype.core.kv_cache import ContiguousKVCache, KVCache, LayeredKVCache, RingKVCache


def contiguous(batch: int = 1, capacity: int = 8, window: int | None = None) -> ContiguousKVCache:
    return ContiguousKVCache(layers=2, batch=batch, kv_heads=1, head_width=2, capacity=capacity, window=window)


def ring(batch: int = 1, window: int = 4, chunk: int = 2) -> RingKVCache:
    return RingKVCache(layers=2, batch=batch, kv_heads=1, head_width=2, window=window, chunk=chunk)


def read(cache: KVCache, new: Tensor) -> Tensor:
    """Both blocks take `new` [B, L] (keys; the values are its negative); the keys [B, Lk] that block 1 sees."""
    tokens = new[:, None, :, None].expand(-1, -1, -1, 2).contiguous()
    cache.update(0, 10 * tokens, tokens)
    keys, values = cache.update(1, tokens, -tokens)
    assert torch.equal(keys.nan_to_num(), -values.nan_to_num())
    return keys[:, 0, :, 0]


def test_update_gives_views_of_what_was_written() -> None:
    cache = contiguous(capacity=4)
    keys, values = torch.tensor([[[[1.0, 2], [3, 4]]]]), torch.tensor([[[[5.0, 6], [7, 8]]]])
    for _ in range(2):
        all_keys, all_values = cache.update(1, keys, values)
    cache.advance([1])
    assert all_keys.tolist() == [[[[1, 2], [3, 4]]]]
    assert all_values.tolist() == [[[[5, 6], [7, 8]]]]
    all_keys, _ = cache.update(1, keys[:, :, 1:], values[:, :, 1:])
    assert all_keys.tolist() == [[[[1, 2], [3, 4]]]]
    other, _ = cache.update(0, values, keys)
    assert other.tolist() == [[[[0, 0], [5, 6], [7, 8]]]]


def test_the_capacity_ends() -> None:
    cache = contiguous(batch=2, capacity=4)
    new = torch.zeros(2, 1, 3, 2)
    cache.update(0, new, new)
    cache.advance([3, 1])
    with pytest.raises(ValueError, match=r"3 cached \+ 2 new tokens exceed the cache's capacity of 4"):
        cache.update(0, new[:, :, :2], new[:, :, :2])
    with pytest.raises(ValueError, match="capacity is 0; it must be at least 1"):
        contiguous(capacity=0)
    with pytest.raises(ValueError, match="window is 0; it must be at least 1"):
        contiguous(window=0)
    with pytest.raises(ValueError, match="chunk is 0; it must be at least 1"):
        ring(chunk=0)


def test_large_buffers_grow_as_needed() -> None:
    cache = contiguous(batch=2, capacity=5000)
    token = 2 * 2 * 1 * 2 * 2 * 4  # two blocks' keys and values of two rows, in bytes
    assert cache.bytes == 1024 * token
    tokens = torch.arange(2500.0)[None].expand(2, -1)
    read(cache, tokens[:, :1000])
    cache.advance([1000, 10])
    assert cache.bytes == 1024 * token
    read(cache, tokens[:, 1000:1100])
    cache.advance([100, 100])
    assert cache.bytes == 2048 * token
    seen = read(cache, tokens[:, :1])
    assert torch.equal(seen[0, :1100], tokens[0, :1100])
    assert torch.equal(seen[1, :110], torch.cat([tokens[0, :10], tokens[0, 1000:1100]]))
    read(cache, tokens[:, :2500])
    assert cache.bytes == 4096 * token
    cache.advance([2500, 2500])
    read(cache, tokens[:, :1000])
    assert cache.bytes == 5000 * token


def test_bytes_are_those_of_the_buffers() -> None:
    cache = ContiguousKVCache(layers=3, batch=2, kv_heads=5, head_width=4, capacity=7, dtype=torch.bfloat16)
    assert cache.bytes == 3 * 2 * (2 * 5 * 7 * 4) * 2


def test_reset_leaves_nothing() -> None:
    for cache in (contiguous(batch=2), ring(batch=2)):
        read(cache, torch.full((2, 6), torch.nan))
        cache.advance([6, 2])
        cache.reset()
        assert cache.lengths.tolist() == [0, 0]
        read(cache, torch.ones(2, 3))
        cache.advance([3, 1])
        assert bool(read(cache, torch.ones(2, 1)).isfinite().all())


def test_a_ring_keeps_its_window_and_a_chunk() -> None:
    cache, token = ring(window=4, chunk=2), 2 * 2 * 2 * 4
    tokens = torch.arange(200.0)[None]
    for start in range(0, 100, 2):
        seen = read(cache, tokens[:, start : start + 2])
        assert seen[0].tolist() == list(range(max(0, start - 3), start + 2))
        cache.advance([2])
        assert cache.bytes == (3 + 2) * token
    assert read(cache, tokens[:, 100:190])[0].tolist() == list(range(97, 190))
    assert cache.bytes == (3 + 90) * token
    cache.advance([90])
    assert read(cache, tokens[:, 190:191])[0].tolist() == list(range(187, 191))
    assert cache.bytes == (3 + 2) * token


def test_a_ring_begins_small() -> None:
    cache = ring(window=1000, chunk=256)
    token = 2 * 2 * 2 * 4
    assert cache.bytes == 64 * token
    for size in (128, 256, 512, 512, 512, 1024):
        read(cache, torch.zeros(1, 100))
        cache.advance([100])
        assert cache.bytes == size * token


def test_rows_of_a_ring_forget_on_their_own() -> None:
    cache = ring(batch=2, window=3, chunk=1)
    text = [torch.arange(20.0), torch.arange(100.0, 120.0)]
    done = [0, 0]
    for counts in ([4, 1], [4, 0], [1, 1], [1, 1], [0, 1], [2, 2], [1, 1]):
        num_new = max(counts)
        new = torch.full((2, num_new), -7.0)
        for b, count in enumerate(counts):
            new[b, :count] = text[b][done[b] : done[b] + count]
        mask = cache.mask(0, num_new)
        seen = read(cache, new)
        dense = mask.dense(num_new, seen.shape[1], seen.device)
        for b, count in enumerate(counts):
            for n in range(count):
                place = done[b] + n
                visible = seen[b] if dense is None else seen[b][dense[b if len(dense) > 1 else 0, 0, n]]
                assert visible.tolist() == text[b][max(0, place - 2) : place + 1].tolist()
        cache.advance(counts)
        done = [old + count for old, count in zip(done, counts, strict=True)]


def test_a_window_as_long_as_the_text_is_the_contiguous_cache() -> None:
    plain, windowed = contiguous(batch=2, capacity=9), ring(batch=2, window=9, chunk=1)
    for num_new, counts in ((4, [4, 2]), (1, [1, 1]), (4, [2, 4])):
        new = torch.randn(2, num_new)
        assert torch.equal(read(plain, new), read(windowed, new))
        a, b = plain.mask(0, num_new), windowed.mask(1, num_new)
        assert (a.window, b.window) == (None, None)
        assert torch.equal(torch.as_tensor(a.query_offset), torch.as_tensor(b.query_offset))
        plain.advance(counts)
        windowed.advance(counts)


def test_masks_say_where_rows_stand() -> None:
    cache = contiguous(batch=2)
    assert cache.mask(0, 3).is_causal_at_end(3, 3)
    read(cache, torch.zeros(2, 3))
    cache.advance([3, 1])
    offset = cache.mask(0, 3).query_offset
    assert isinstance(offset, Tensor)
    assert offset.tolist() == [3, 1]
    assert cache.mask(0, 3) is cache.mask(1, 3)
    read(cache, torch.zeros(2, 3))
    cache.advance([0, 2])
    assert cache.mask(0, 1).query_offset == 3


def test_layers_go_to_their_caches() -> None:
    full = ContiguousKVCache(layers=1, batch=1, kv_heads=1, head_width=2, capacity=9)
    cache = LayeredKVCache([ring(window=2), full], (0, 1, 0))
    for block in (0, 1, 2):
        tokens = torch.full((1, 1, 1, 2), float(block))
        assert cache.update(block, tokens, tokens)[0].unique().tolist() == [block]
    cache.advance(torch.tensor([1]))
    assert full.lengths.tolist() == cache.lengths.tolist() == [1]
    assert cache.mask(0, 2) is cache.mask(2, 2)
    assert cache.mask(0, 2).window == 2
    assert cache.mask(1, 2).window is None
    assert cache.bytes == full.bytes + 3 * 2 * 2 * 2 * 4


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layout is \[0, 2\]; it must use each of the 2 caches"):
        LayeredKVCache([contiguous(), ring()], (0, 2))
    moved = contiguous()
    read(moved, torch.zeros(1, 2))
    moved.advance([2])
    with pytest.raises(ValueError, match=r"the caches' rows have read \[\[2\], \[0\]\] tokens; they must agree"):
        LayeredKVCache([moved, ring()], (0, 1))
