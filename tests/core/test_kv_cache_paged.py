"""The paged cache's pool: blocks are taken, shared and freed as they should be."""

import pytest
import torch
from torch import Tensor

from calotype.core.kv_cache import PagedKVCache, PagedPool, PagedSequence, TokenChain, share_prefix

SIZE = 4


def pool_of(num_blocks: int, window: int | None = None) -> PagedPool:
    return PagedPool(layers=1, num_blocks=num_blocks, kv_heads=1, head_width=2, block_size=SIZE, window=window)


def read(sequence: PagedSequence, tokens: list[int]) -> Tensor:
    """The sequence reads tokens whose keys are themselves; all keys seen."""
    new = torch.tensor(tokens, dtype=torch.float32)[None, None, :, None].expand(-1, -1, -1, 2)
    cache = PagedKVCache([sequence])
    keys, values = cache.update(0, new, -new)
    assert torch.equal(keys, -values)
    cache.advance([len(tokens)])
    return keys[0, 0, :, 0]


def test_blocks_are_taken_as_needed_and_freed_at_once() -> None:
    pool = pool_of(5)
    a, b = PagedSequence(pool), PagedSequence(pool)
    read(a, [1, 2, 3, 4])
    assert (pool.num_free, a.num_missing(1)) == (4, 1)
    read(b, [5])
    read(a, [6])
    assert read(b, [7, 8]).tolist() == [5, 7, 8]
    assert pool.num_free == 2
    a.release()
    assert (pool.num_free, a.length) == (4, 0)
    assert read(b, list(range(9))).tolist() == [5, 7, 8, *range(9)]
    b.release()
    assert pool.num_free == pool.num_blocks == 5
    assert pool.bytes == 2 * 7 * SIZE * 2 * 4


def test_a_full_pool_is_an_error_that_takes_nothing() -> None:
    pool = pool_of(2)
    a, b = PagedSequence(pool), PagedSequence(pool)
    read(a, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="2 more blocks of 4 tokens are needed; 1 of the pool's 2 are free"):
        read(b, list(range(5)))
    assert (pool.num_free, b.length) == (1, 0)
    read(b, [1])


def test_a_block_shows_nothing_of_its_past() -> None:
    pool = pool_of(1)
    a = PagedSequence(pool)
    new = torch.full((1, 1, 4, 2), torch.nan)
    PagedKVCache([a]).update(0, new, new)
    a.release()
    read(PagedSequence(pool), [1])
    assert bool(pool.buffers[:, :, 0].isfinite().all())


def test_padding_takes_no_blocks() -> None:
    pool = pool_of(3)
    rows = [PagedSequence(pool), PagedSequence(pool)]
    cache = PagedKVCache(rows, counts=[5, 2])
    new = torch.arange(10.0).view(2, 1, 5, 1).expand(-1, -1, -1, 2)
    keys, _ = cache.update(0, new, new)
    assert pool.num_free == 0
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4]
    assert keys[1, 0, :, 0].tolist() == [5, 6, 0, 0, 0]
    with pytest.raises(ValueError, match=r"counts are \[5, 3\]; at most \[5, 2\] were announced"):
        cache.advance([5, 3])
    cache.advance([5, 2])
    assert [row.length for row in rows] == [5, 2]


def test_full_blocks_of_equal_beginnings_are_held_once() -> None:
    pool = pool_of(9)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    first = PagedSequence(pool, TokenChain(tokens, SIZE))
    read(first, tokens)
    assert pool.num_free == 6
    same = PagedSequence(pool, TokenChain(tokens, SIZE))
    assert share_prefix([same]) == 8
    assert (same.length, pool.num_free) == (8, 6)
    assert read(same, [5]).tolist() == tokens
    assert pool.num_free == 5
    assert (same.blocks[:2], same.blocks[2] == first.blocks[2]) == (first.blocks[:2], False)
    # the last token is always left to be read, so that logits can follow it
    shorter = PagedSequence(pool, TokenChain(tokens[:8], SIZE))
    assert share_prefix([shorter]) == 4
    # other tokens before, or within, the block
    for other in ([3, 1, 4, 2, *tokens[4:]], [0, *tokens]):
        assert share_prefix([PagedSequence(pool, TokenChain(other, SIZE))]) == 0
    first.release()
    assert pool.num_free == 6
    assert share_prefix([PagedSequence(pool, TokenChain(tokens, SIZE))]) == 8
    # within a block nothing is shared
    within = PagedSequence(pool, TokenChain(tokens, SIZE))
    read(within, [3])
    assert share_prefix([within]) == 0


def test_what_no_one_holds_is_not_found() -> None:
    pool = pool_of(4)
    tokens = [1, 2, 3, 4, 5]
    first = PagedSequence(pool, TokenChain(tokens, SIZE))
    read(first, tokens)
    again = PagedSequence(pool, TokenChain(tokens, SIZE))
    share_prefix([again])
    for sequence in (again, first):
        sequence.release()
    assert pool.num_free == 4
    assert share_prefix([PagedSequence(pool, TokenChain(tokens, SIZE))]) == 0


def test_reserved_blocks_make_way_for_shared_ones() -> None:
    pool = pool_of(8)
    tokens = list(range(9))
    late, early = PagedSequence(pool, TokenChain(tokens, SIZE)), PagedSequence(pool, TokenChain(tokens, SIZE))
    late.reserve(9)
    read(early, tokens)
    assert pool.num_free == 2
    assert share_prefix([late]) == 8
    assert pool.num_free == 5
    assert read(late, [8]).tolist() == tokens


def test_blocks_out_of_the_window_are_given_back() -> None:
    pool = pool_of(6, window=5)
    sequence = PagedSequence(pool)
    for start in range(40):
        assert read(sequence, [start]).tolist() == list(range(max(0, start - 4), start + 1))
        assert pool.num_free >= 4
    assert read(sequence, list(range(40, 52))).tolist() == list(range(36, 52))
    assert pool.num_free == 5
    sequence.release()
    assert pool.num_free == 6


def test_a_window_is_shared_where_it_is_still_held() -> None:
    full, sliding = pool_of(9), pool_of(9, window=5)
    tokens = list(range(13))
    chain = TokenChain(tokens, SIZE)
    first = [PagedSequence(full, chain), PagedSequence(sliding, chain)]
    for sequence in first:
        read(sequence, tokens[:8])
    late_chain = TokenChain(tokens, SIZE)
    late = [PagedSequence(full, late_chain), PagedSequence(sliding, late_chain)]
    assert share_prefix(late) == 8
    assert (full.num_free, sliding.num_free) == (7, 8)
    assert [read(sequence, [8]).tolist() for sequence in late] == [tokens[:9], tokens[4:9]]
    for sequence in late:
        sequence.release()
    for sequence in first:
        read(sequence, tokens[8:12])
    # blocks 0 and 1 have left the window: only the whole three can be shared
    shorter_chain = TokenChain(tokens[:9], SIZE)
    assert share_prefix([PagedSequence(full, shorter_chain), PagedSequence(sliding, shorter_chain)]) == 0
    late = [PagedSequence(full, late_chain), PagedSequence(sliding, late_chain)]
    assert share_prefix(late) == 12
    assert late[1].blocks[:2] == [sliding.zero_block] * 2
    for sequence in (*first, *late):
        sequence.release()
    assert (full.num_free, sliding.num_free) == (9, 9)


def test_misuse_is_refused() -> None:
    pool = pool_of(4)
    a = PagedSequence(pool)
    with pytest.raises(ValueError, match="no sequences; a cache needs at least one"):
        PagedKVCache([])
    with pytest.raises(ValueError, match="a sequence comes twice"):
        PagedKVCache([a, a])
    with pytest.raises(ValueError, match="the sequences are of several pools"):
        PagedKVCache([a, PagedSequence(pool_of(1))])
    with pytest.raises(ValueError, match=r"counts are \[1\] for 2 rows"):
        PagedKVCache([a, PagedSequence(pool)], counts=[1])
    with pytest.raises(ValueError, match="the chain's blocks are of 5 tokens; the pool's of 4"):
        PagedSequence(pool, TokenChain([1], 5))
    with pytest.raises(ValueError, match="num_blocks is 0; it must be at least 1"):
        pool_of(0)
