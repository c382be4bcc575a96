"""Every backend against the plain definition, and the definition against a loop over single queries."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from calotype.core.attention.base import FULL, AttentionBackend, AttentionCall, AttentionMask
from calotype.core.attention.flash_attn import FlashAttention
from calotype.core.attention.flex import FlexAttention
from calotype.core.attention.reference import ReferenceAttention
from calotype.core.attention.sdpa import SDPAAttention
from calotype.core.attention.xformers import XFormersAttention

MASKS = {
    "full": (FULL, 7, 7),
    "cross": (FULL, 5, 11),
    "causal": (AttentionMask(causal=True), 7, 7),
    "causal, more keys": (AttentionMask(causal=True), 5, 9),
    "offset": (AttentionMask(causal=True, query_offset=4), 3, 7),
    "offset, more keys": (AttentionMask(causal=True, query_offset=2), 3, 9),
    "last token": (AttentionMask(causal=True, query_offset=8), 1, 9),
    "row offsets": (AttentionMask(causal=True, query_offset=torch.tensor([4, 0])), 3, 7),
    "key lengths": (AttentionMask(key_lengths=torch.tensor([5, 11])), 5, 11),
    "causal key lengths": (AttentionMask(causal=True, key_lengths=torch.tensor([3, 7])), 7, 7),
    "window": (AttentionMask(causal=True, window=3), 7, 7),
    "window, row offsets": (AttentionMask(causal=True, query_offset=torch.tensor([4, 0]), window=2), 3, 7),
    "window, last token": (AttentionMask(causal=True, query_offset=8, window=4), 1, 9),
    "key lengths, one query": (AttentionMask(key_lengths=torch.tensor([5, 9])), 1, 9),
}
AT_THE_END = ("full", "cross", "causal", "offset", "last token")


def make_call(
    mask: AttentionMask,
    num_queries: int,
    num_keys: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 24,
    dtype: torch.dtype = torch.float32,
) -> AttentionCall:
    generator = torch.Generator().manual_seed(num_queries * 100 + num_keys)
    queries = torch.randn(2, heads, num_queries, width, generator=generator)
    keys = torch.randn(2, kv_heads, num_keys, width, generator=generator)
    values = torch.randn(2, kv_heads, num_keys, width, generator=generator)
    return AttentionCall(queries=queries.to(dtype), keys=keys.to(dtype), values=values.to(dtype), mask=mask, scale=0.3)


def one_query_at_a_time(call: AttentionCall) -> Tensor:
    """The definition in loops, float64, without masks: each query meets only the keys that it sees."""
    out = torch.zeros(call.queries.shape, dtype=torch.float64)
    groups = call.queries.shape[1] // call.keys.shape[1]
    offset, lengths = call.mask.query_offset, call.mask.key_lengths
    for b, h, n in torch.cartesian_prod(*(torch.arange(size) for size in call.queries.shape[:3])).tolist():
        start, stop = 0, call.keys.shape[2]
        if call.mask.causal:
            place = n + (int(offset[b]) if isinstance(offset, Tensor) else offset)
            stop = min(stop, place + 1)
            start = 0 if call.mask.window is None else max(0, place + 1 - call.mask.window)
        if lengths is not None:
            stop = min(stop, int(lengths[b]))
        keys, values = (x[b, h // groups, start:stop].double() for x in (call.keys, call.values))
        weights = torch.exp(call.scale * (keys @ call.queries[b, h, n].double()))
        out[b, h, n] = weights @ values / weights.sum().clamp(min=1e-300)
    return out


@pytest.mark.parametrize("name", MASKS)
def test_the_reference_is_the_definition(name: str) -> None:
    call = make_call(*MASKS[name])
    torch.testing.assert_close(ReferenceAttention()(call).double(), one_query_at_a_time(call), rtol=1e-5, atol=1e-5)


def test_the_reference_keeps_float64() -> None:
    call = make_call(*MASKS["causal"], dtype=torch.float64)
    torch.testing.assert_close(ReferenceAttention()(call), one_query_at_a_time(call), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MASKS)
def test_sdpa_equals_the_reference(name: str) -> None:
    for heads, kv_heads, width in ((4, 2, 24), (3, 3, 10), (5, 1, 7)):
        call = make_call(*MASKS[name], heads=heads, kv_heads=kv_heads, width=width)
        assert SDPAAttention().refuses(call) is None
        torch.testing.assert_close(SDPAAttention()(call), ReferenceAttention()(call), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def flex() -> FlexAttention:
    return FlexAttention()


@pytest.mark.parametrize(("num_queries", "offset"), [(256, 0), (300, 0), (400, 77), (257, 1)])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_causal_calls_go_in_parts(
    num_queries: int, offset: int, kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = AttentionMask(causal=True, query_offset=offset)
    call = make_call(mask, num_queries, num_queries + offset, kv_heads=kv_heads, dtype=dtype)
    whole = SDPAAttention()(call)  # where a gradient may follow
    lengths: list[int] = []
    plain = functional.scaled_dot_product_attention

    def watched(queries: Tensor, *arguments: Tensor, **options: Any) -> Tensor:
        lengths.append(queries.shape[2])
        return plain(queries, *arguments, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    with torch.no_grad():
        found = SDPAAttention()(call)
    assert sum(lengths) == num_queries and max(lengths) == 128
    torch.testing.assert_close(found, whole, atol=1e-6 if dtype == torch.float32 else 0.02, rtol=1e-5)


@pytest.mark.parametrize(
    "mask",
    [
        FULL,
        AttentionMask(causal=True),
        AttentionMask(causal=True, query_offset=3),
        AttentionMask(causal=True, query_offset=torch.tensor([4, 0])),
        AttentionMask(key_lengths=torch.tensor([5, 11])),
        AttentionMask(causal=True, query_offset=6, key_lengths=torch.tensor([3, 9])),
        AttentionMask(causal=True, query_offset=3, window=2),
        AttentionMask(causal=True, query_offset=20),
    ],
    ids=["full", "causal", "offset", "row offsets", "key lengths", "causal key lengths", "window", "past"],
)
def test_flex_equals_the_reference(mask: AttentionMask, flex: FlexAttention) -> None:
    """One shape, since each new kind of shape is traced again."""
    call = make_call(mask, 5, 11)
    assert flex.refuses(call) is None
    for _ in range(2):  # the second time with the kept block mask
        torch.testing.assert_close(flex(call), ReferenceAttention()(call), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", [ReferenceAttention(), SDPAAttention()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", ["cross", "causal", "key lengths"])
def test_bfloat16_is_within_its_rounding(name: str, backend: AttentionBackend) -> None:
    call = make_call(*MASKS[name], dtype=torch.bfloat16)
    exact = one_query_at_a_time(call)
    out = backend(call)
    assert out.dtype == torch.bfloat16
    assert float((out.double() - exact).norm() / exact.norm()) < 0.006


@pytest.mark.parametrize("name", ["full", "causal", "key lengths", "row offsets"])
def test_gradients_equal_the_reference(name: str) -> None:
    gradients = []
    for backend in (ReferenceAttention(), SDPAAttention()):
        call = make_call(*MASKS[name])
        inputs = (call.queries, call.keys, call.values)
        for tensor in inputs:
            tensor.requires_grad_()
        backend(call).square().sum().backward()
        gradients.append([tensor.grad for tensor in inputs])
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "flex"])
def test_a_query_that_sees_nothing_gets_zeros(backend: str, flex: FlexAttention) -> None:
    attend = {"reference": ReferenceAttention(), "sdpa": SDPAAttention(), "flex": flex}[backend]
    call = make_call(AttentionMask(key_lengths=torch.tensor([0, 5])), 5, 11)
    out = attend(call)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    torch.testing.assert_close(out[1:].double(), one_query_at_a_time(call)[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", [ReferenceAttention(), SDPAAttention()], ids=lambda backend: backend.name)
def test_a_query_that_sees_nothing_gets_finite_gradients(backend: AttentionBackend) -> None:
    call = make_call(AttentionMask(key_lengths=torch.tensor([0, 5])), 5, 11)
    call.queries.requires_grad_()
    call.keys.requires_grad_()
    backend(call).square().sum().backward()
    for tensor in (call.queries, call.keys):
        assert tensor.grad is not None
        assert bool(tensor.grad.isfinite().all())
        assert float(tensor.grad[0].abs().max()) == 0 < float(tensor.grad[1].abs().max())


@pytest.mark.parametrize("backend", [ReferenceAttention(), SDPAAttention()], ids=lambda backend: backend.name)
def test_inputs_are_not_changed(backend: AttentionBackend) -> None:
    lengths = torch.tensor([5, 11])
    call = make_call(AttentionMask(key_lengths=lengths), 5, 11)
    before = [tensor.clone() for tensor in (call.queries, call.keys, call.values, lengths)]
    backend(call)
    for old, new in zip(before, (call.queries, call.keys, call.values, lengths), strict=True):
        assert torch.equal(old, new)


STAND_INS = {
    "flash_attn/__init__.py": """
import torch
from torch import Tensor


def bottom_right(q: Tensor, k: Tensor) -> Tensor:
    num_queries, num_keys = q.shape[1], k.shape[1]
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    return attend(q, k, v, softmax_scale, bottom_right(q, k) if causal else None)


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, softmax_scale):
    assert cache_seqlens.dtype == torch.int32 and int(cache_seqlens.max()) <= k_cache.shape[1]
    seen = torch.arange(k_cache.shape[1]) < cache_seqlens[:, None]
    return attend(q, k_cache, v_cache, softmax_scale, seen[:, None, None])
""",
    "xformers/__init__.py": "",
    "xformers/ops/__init__.py": """
from flash_attn import attend, bottom_right


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None):
    assert query.shape[2] == key.shape[2] == value.shape[2]
    return attend(query, key, value, scale, None if attn_bias is None else bottom_right(query, key))
""",
    "xformers/ops/fmha/__init__.py": "",
    "xformers/ops/fmha/attn_bias.py": "class LowerTriangularFromBottomRightMask: ...",
}


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages with the conventions of flash-attn and xformers: token-major, causal masks aligned at the last key."""
    for name, text in STAND_INS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    known = {name for name in sys.modules if name.split(".")[0] in ("flash_attn", "xformers")}
    for name in known:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "xformers")]:
        del sys.modules[name]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", [*AT_THE_END, "key lengths"])
def test_flash_attn_is_called_with_its_conventions(name: str) -> None:
    call = make_call(*MASKS[name])
    torch.testing.assert_close(FlashAttention()(call), ReferenceAttention()(call), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", AT_THE_END)
def test_xformers_is_called_with_its_conventions(name: str) -> None:
    call = make_call(*MASKS[name])
    torch.testing.assert_close(XFormersAttention()(call), ReferenceAttention()(call), rtol=1e-5, atol=1e-5)
