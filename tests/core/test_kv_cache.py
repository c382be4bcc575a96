"""One contract for every key/value cache: chunks equal the whole, ragged rows equal single rows, padding is never seen,
and misuse is refused."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from calotype.core.attention.base import AttentionMask
from calotype.core.attention.registry import attention_selector
from calotype.core.blocks.decoder import DecoderBlock, DecoderConfig
from calotype.core.kv_cache import (
    ContiguousKVCache,
    KVCache,
    LayeredKVCache,
    PagedKVCache,
    PagedPool,
    PagedSequence,
    RingKVCache,
)
from calotype.core.rotary import RotaryConfig, rotary_table
from calotype.core.stream import AttentionInputs, BlockInputs, Cache, NoCache, Stream, run_blocks

WIDTH, HEAD, LAYERS, WINDOW = 12, 8, 3, 4
ROTARY = RotaryConfig(axes=(HEAD,), pairing="half")


def contiguous(batch: int, *, layers: int = LAYERS, capacity: int = 12, window: int | None = None) -> ContiguousKVCache:
    return ContiguousKVCache(layers=layers, batch=batch, kv_heads=2, head_width=HEAD, capacity=capacity, window=window)


def ring(batch: int, *, layers: int = LAYERS, window: int = WINDOW, chunk: int = 2) -> RingKVCache:
    return RingKVCache(layers=layers, batch=batch, kv_heads=2, head_width=HEAD, window=window, chunk=chunk)


def paged(batch: int, *, layers: int = LAYERS, window: int | None = None, num_blocks: int = 16) -> PagedKVCache:
    pool = PagedPool(layers=layers, num_blocks=num_blocks, kv_heads=2, head_width=HEAD, block_size=3, window=window)
    return PagedKVCache([PagedSequence(pool) for _ in range(batch)])


def layered(batch: int) -> LayeredKVCache:
    return LayeredKVCache([contiguous(batch, layers=1), ring(batch, layers=2)], (1, 0, 1))


def layered_paged(batch: int) -> LayeredKVCache:
    return LayeredKVCache([paged(batch, layers=1), paged(batch, layers=2, window=WINDOW)], (1, 0, 1))


# a cache, and the windows of the blocks with which it must agree
KINDS: dict[str, tuple[Callable[[int], KVCache], tuple[int | None, ...]]] = {
    "contiguous": (contiguous, (None,) * LAYERS),
    "contiguous window": (lambda batch: contiguous(batch, window=WINDOW), (WINDOW,) * LAYERS),
    "ring": (ring, (WINDOW,) * LAYERS),
    "ring of one": (lambda batch: ring(batch, window=1, chunk=1), (1,) * LAYERS),
    "ring longer than the text": (lambda batch: ring(batch, window=9), (9,) * LAYERS),
    "paged": (paged, (None,) * LAYERS),
    "paged window": (lambda batch: paged(batch, window=WINDOW), (WINDOW,) * LAYERS),
    "layered": (layered, (WINDOW, None, WINDOW)),
    "layered paged": (layered_paged, (WINDOW, None, WINDOW)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def blocks() -> list[DecoderBlock]:
    torch.manual_seed(3)
    config = DecoderConfig(width=WIDTH, heads=4, kv_heads=2, head_width=HEAD, hidden=16, qk_norm=True)
    return [DecoderBlock(config) for _ in range(LAYERS)]


@torch.no_grad()
def run(
    blocks: Sequence[DecoderBlock], x: Tensor, positions: Tensor, masks: Sequence[AttentionMask], cache: Cache
) -> Tensor:
    rotary = rotary_table(ROTARY, positions)
    special = {i: AttentionInputs(rotary=rotary, mask=mask) for i, mask in enumerate(masks)}
    prepared = BlockInputs(rotary=rotary, mask=masks[0], attention=attention_selector(), special=special)
    return run_blocks(list(blocks), Stream(x=x), prepared, cache).x


def whole(blocks: Sequence[DecoderBlock], x: Tensor, windows: Sequence[int | None]) -> Tensor:
    masks = [AttentionMask(causal=True, window=window) for window in windows]
    return run(blocks, x, torch.arange(x.shape[1])[:, None], masks, NoCache())


def step(blocks: Sequence[DecoderBlock], x: Tensor, cache: KVCache, counts: Sequence[int] | None = None) -> Tensor:
    masks = [cache.mask(i, x.shape[1]) for i in range(len(blocks))]
    out = run(blocks, x, cache.positions(x.shape[1]), masks, cache)
    cache.advance(torch.tensor(counts) if counts is not None else torch.full((len(x),), x.shape[1]))
    return out


@every_kind
@pytest.mark.parametrize("chunks", [(9,), (4, 5), (1,) * 9, (6, 1, 2)])
def test_chunks_equal_the_whole(blocks: list[DecoderBlock], kind: str, chunks: tuple[int, ...]) -> None:
    make, windows = KINDS[kind]
    x, cache = torch.randn(2, 9, WIDTH), make(2)
    parts = [step(blocks, part, cache) for part in x.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole(blocks, x, windows), rtol=1e-5, atol=1e-5)
    assert cache.lengths.tolist() == [9, 9]
    assert cache.lengths.dtype == torch.int64
    assert cache.batch == 2


@every_kind
def test_ragged_rows_equal_single_rows(blocks: list[DecoderBlock], kind: str) -> None:
    """Prompts of 5, 2 and 3 tokens, padded with noise; then steps of 1, 2 (padded), and 1 in which row 1 rests."""
    make, windows = KINDS[kind]
    x = torch.randn(3, 9, WIDTH)
    cache, done = make(3), [0, 0, 0]
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
        expected = whole(blocks, x[b : b + 1, :length], windows)[0]
        torch.testing.assert_close(torch.cat(results[b]), expected, rtol=1e-5, atol=1e-5)


def test_a_ring_as_long_as_the_text_is_the_contiguous_cache_bit_for_bit(blocks: list[DecoderBlock]) -> None:
    x, plain, windowed = torch.randn(2, 9, WIDTH), contiguous(2), ring(2, window=9, chunk=1)
    for num_new, counts in ((4, [4, 2]), (1, [1, 1]), (3, [3, 2]), (1, [1, 1])):
        assert torch.equal(step(blocks, x[:, :num_new], plain, counts), step(blocks, x[:, :num_new], windowed, counts))


@every_kind
def test_nothing_counts_before_advance(blocks: list[DecoderBlock], kind: str) -> None:
    make, windows = KINDS[kind]
    x, cache = torch.randn(1, 8, WIDTH), make(1)
    step(blocks, x[:, :5], cache)
    for noise in (torch.randn(1, 3, WIDTH), x[:, 5:]):
        masks = [cache.mask(i, 3) for i in range(LAYERS)]
        out = run(blocks, noise, cache.positions(3), masks, cache)
    torch.testing.assert_close(out, whole(blocks, x, windows)[:, 5:], rtol=1e-5, atol=1e-5)
    cache.advance([0])
    assert cache.lengths.tolist() == [5]


@every_kind
def test_one_row_needs_no_mask_tensor_to_decode(kind: str) -> None:
    cache = KINDS[kind][0](1)
    for num_new, start in ((7, 0), (1, 7), (1, 8)):
        masks = [cache.mask(i, num_new) for i in range(LAYERS)]
        assert all(cache.mask(i, num_new) is mask for i, mask in enumerate(masks))
        keys = torch.randn(1, 2, num_new, HEAD)
        sizes = [cache.update(i, keys, keys)[0].shape[2] for i in range(LAYERS)]
        if num_new == 1:
            assert [mask.dense(1, size, keys.device) for mask, size in zip(masks, sizes, strict=True)] == [
                None
            ] * LAYERS
            limits = [9 if window is None else window for window in KINDS[kind][1]]
            assert sizes == [min(start + 1, limit) for limit in limits]
        cache.advance([num_new])


@every_kind
def test_positions_are_those_of_the_text(kind: str) -> None:
    cache = KINDS[kind][0](2)
    assert cache.positions(2).tolist() == [[[0], [1]], [[0], [1]]]
    new = torch.zeros(2, 2, 7, HEAD)
    for i in range(LAYERS):
        cache.update(i, new, new)
    held = cache.lengths
    cache.advance([7, 2])
    assert held.tolist() == [0, 0]
    assert cache.positions(2).tolist() == [[[7], [8]], [[2], [3]]]


@every_kind
def test_gradients_stop_at_the_cache_and_arguments_stay(kind: str) -> None:
    cache = KINDS[kind][0](1)
    new = torch.randn(1, 2, 3, HEAD, requires_grad=True)
    before = new.detach().clone()
    keys, values = cache.update(0, new, 2 * new)
    assert not keys.requires_grad
    assert torch.equal(keys, before)
    assert torch.equal(values, 2 * before)
    assert torch.equal(new.detach(), before)


@every_kind
def test_misuse_is_refused_with_numbers(kind: str) -> None:
    cache = KINDS[kind][0](2)
    new = torch.zeros(2, 2, 3, HEAD)
    for i in range(LAYERS):
        cache.update(i, new, new)
    with pytest.raises(ValueError, match=r"counts are \[4, 0\]; each must be from 0 to the 3 tokens just written"):
        cache.advance([4, 0])
    with pytest.raises(ValueError, match=r"counts are \[-1, 0\]"):
        cache.advance([-1, 0])
    with pytest.raises(ValueError, match="1 counts for a cache of 2 rows"):
        cache.advance([1])
    cache.advance([3, 1])
    with pytest.raises(ValueError, match=r"values are \[1, 2, 1, 8\]; the cache takes \[2, 2, 1, 8\]"):
        cache.update(0, new[:, :, :1], new[:1, :, :1])
    with pytest.raises(ValueError, match=r"keys are torch.bfloat16; the cache keeps torch.float32"):
        cache.update(0, new[:, :, :1].bfloat16(), new[:, :, :1].bfloat16())


@every_kind
def test_bytes_are_counted(kind: str) -> None:
    cache = KINDS[kind][0](2)
    assert cache.bytes > 0
    assert cache.bytes % (2 * 2 * HEAD * 4) == 0  # keys and values of two heads
