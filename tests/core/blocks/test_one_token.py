"""A stack of blocks in one call gives what the blocks give one after the other."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from calotype.core.attention.registry import attention_selector
from calotype.core.blocks import one_token
from calotype.core.blocks.one_token import OneTokenRunner
from calotype.core.kv_cache import (
    ContiguousKVCache,
    KVCache,
    LayeredKVCache,
    PagedKVCache,
    PagedPool,
    PagedSequence,
    RingKVCache,
)
from calotype.core.ops import kernels
from calotype.core.ops.packed import pack_linears
from calotype.core.ops.packed_matrix import Kind
from calotype.core.stream import BlockInputs, Cache, Stream, run_blocks
from calotype.language.model import LanguageModel, LanguageModelConfig

pytestmark = pytest.mark.skipif(not kernels.IS_BUILT, reason="our kernels are not built here")
SIZES = {"kv_heads": 2, "head_width": 24}  # the kernel turns halves of 12 eight at a time, then one by one


def model(**options: object) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "width": 64, "layers": 3, "heads": 4, "hidden": 96, **SIZES}
    made = LanguageModel(LanguageModelConfig(**sizes, **options)).requires_grad_(False)  # pyright: ignore[reportArgumentType]
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.15 if parameter.dim() > 1 else 0.5)
    return made


def contiguous(batch: int = 1, dtype: torch.dtype = torch.float32, window: int | None = None) -> KVCache:
    inner = ContiguousKVCache(layers=3, batch=batch, capacity=40, window=window, dtype=dtype, **SIZES)
    return LayeredKVCache([inner], [0, 0, 0])


def kept(cache: KVCache) -> Callable[[], KVCache]:
    """The same one for every step."""
    return lambda: cache


def paged(batch: int, dtype: torch.dtype = torch.float32) -> Callable[[], KVCache]:
    pool = PagedPool(layers=3, num_blocks=40, block_size=4, dtype=dtype, **SIZES)
    sequences = [PagedSequence(pool) for _ in range(batch)]
    return lambda: PagedKVCache(sequences)


class Watched:
    """A runner that counts the times that the blocks ran one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(one_token, "run_blocks", self)

    def __call__(self, blocks: Sequence[nn.Module], stream: Stream, prepared: BlockInputs, cache: Cache) -> Stream:
        self.count += 1
        return run_blocks(blocks, stream, prepared, cache)  # pyright: ignore[reportArgumentType]


@torch.inference_mode()
def decoded(
    model: LanguageModel, cache_of: Callable[[], KVCache], prompts: Tensor, counts: list[int], runner
) -> Tensor:
    """The logits of five tokens after prompts of different lengths [5, B, V]."""
    model.logits(prompts, cache=cache_of(), counts=torch.tensor(counts))
    steps = torch.arange(5 * len(prompts)).view(5, len(prompts), 1) % 50
    return torch.stack([model.logits(ids, cache=cache_of(), last_only=True, runner=runner)[:, 0] for ids in steps])


def compared(model: LanguageModel, make: Callable[[], Callable[[], KVCache]], batch: int, limit: float) -> None:
    prompts, counts = torch.arange(7 * batch).view(batch, 7) % 50, [7 - row % 3 for row in range(batch)]
    one = decoded(model, make(), prompts, counts, OneTokenRunner([*model.blocks]))
    each = decoded(model, make(), prompts, counts, run_blocks)
    assert float((one - each).norm() / each.norm()) <= limit


OPTIONS = [
    {},
    {"qk_norm": True, "attention_scale": 0.2},
    {"qkv_bias": True, "norm_eps": 1e-3},
    {"norm_offset": 1.0, "rope_theta": 500.0},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_it_is_the_blocks(options: dict[str, object], batch: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)

    compared(model(**options), lambda: paged(batch) if kind == "paged" else kept(contiguous(batch)), batch, 1e-6)
    assert watched.count == 0


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_packed_weights(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, watched = model(), Watched(monkeypatch)
    pack_linears(packed, kind)
    compared(packed, lambda: kept(contiguous(2)), 2, 1e-6)
    assert watched.count == 0


def test_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """States stay float32 between the blocks, so they part by what bfloat16 rounds."""
    small, watched = model().bfloat16(), Watched(monkeypatch)

    compared(small, lambda: kept(contiguous(2, torch.bfloat16)), 2, 0.03)
    assert watched.count == 0


def test_rows_are_what_they_are_alone() -> None:
    net = model()
    runner = OneTokenRunner([*net.blocks])
    prompts, counts = torch.arange(21).view(3, 7), [7, 5, 6]
    together = decoded(net, kept(contiguous(3)), prompts, counts, runner)
    for row, count in enumerate(counts):
        cache = contiguous()
        with torch.inference_mode():
            net.logits(prompts[row : row + 1, :count], cache=cache)
            steps = torch.arange(15).view(5, 3)[:, row : row + 1, None]
            alone = torch.cat([net.logits(ids, cache=cache, last_only=True, runner=runner)[:, 0] for ids in steps])
        torch.testing.assert_close(alone, together[:, row], atol=1e-5, rtol=1e-5)


def test_what_it_does_not_know_runs_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)

    def same(net: LanguageModel, cache: Callable[[], KVCache]) -> None:
        before = watched.count
        compared(net, lambda: kept(cache()), 1, 0)
        assert watched.count == before + 5

    same(model(activation="gelu_tanh"), contiguous)
    same(model(sandwich=True), contiguous)
    same(model(window=3), contiguous)
    same(model(), lambda: RingKVCache(layers=3, batch=1, window=30, chunk=8, **SIZES))
    same(model(), lambda: contiguous(window=4))
    chosen = model()
    chosen.attention = attention_selector("sdpa")
    same(chosen, contiguous)
    for dtype in (torch.float64, torch.float16):
        packed = model().to(dtype)
        pack_linears(packed, "int8")
        same(packed, lambda dtype=dtype: contiguous(dtype=dtype))
        same(model().to(dtype), lambda dtype=dtype: contiguous(dtype=dtype))
    watched_by_a_hook = model()
    watched_by_a_hook.blocks[1].mlp.register_forward_hook(lambda *_: None)
    same(watched_by_a_hook, contiguous)


@pytest.mark.parametrize(
    "sizes", [{"layers": 2}, {"kv_heads": 1}, {"head_width": 8}, {"dtype": torch.float16}, {"batch": 2}]
)
def test_a_cache_of_other_sizes_is_refused_as_ever(sizes: dict[str, object]) -> None:
    options = {"layers": 3, "batch": 1, "capacity": 9, **SIZES, **sizes}
    net, cache = model(), ContiguousKVCache(**options)  # pyright: ignore[reportArgumentType]
    with torch.inference_mode(), pytest.raises((ValueError, IndexError)):
        net.logits(torch.tensor([[3]]), cache=cache, runner=OneTokenRunner([*net.blocks]))


def test_changes_in_place_count() -> None:
    net, caches = model(), (contiguous(), contiguous())
    runner = OneTokenRunner([*net.blocks])
    for parameter in net.parameters():
        parameter.mul_(1.1)
    with torch.inference_mode():
        one, each = (
            net.logits(torch.tensor([[3]]), cache=cache, runner=how)
            for cache, how in zip(caches, (runner, run_blocks), strict=True)
        )
    assert float((one - each).norm() / each.norm()) < 1e-6


def test_a_full_cache_says_so() -> None:
    net, cache = model(), ContiguousKVCache(layers=3, batch=1, capacity=2, **SIZES)
    runner = OneTokenRunner([*net.blocks])
    with torch.inference_mode():
        net.logits(torch.tensor([[1, 2]]), cache=cache)
        with pytest.raises(ValueError, match="2 cached \\+ 1 new tokens exceed the cache's capacity of 2"):
            net.logits(torch.tensor([[3]]), cache=cache, runner=runner)
        assert cache.lengths.tolist() == [2]
