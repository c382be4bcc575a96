"""Our kernel as an attention backend: what it refuses, and that masks mean what they mean elsewhere."""

import pytest
import torch

from calotype.core.attention.base import AttentionCall, AttentionMask
from calotype.core.attention.one_query import OneQueryAttention, seen_lengths
from calotype.core.attention.reference import ReferenceAttention
from calotype.core.attention.registry import attention_selector
from calotype.core.ops import kernels

built = pytest.mark.skipif(not kernels.IS_BUILT, reason="our kernels are not built here")


def call_of(mask: AttentionMask, *, queries: int = 1, width: int = 16, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    return AttentionCall(
        queries=torch.randn(3, 4, queries, width, dtype=dtype),
        keys=torch.randn(3, 2, 9, width, dtype=dtype),
        values=torch.randn(3, 2, 9, width, dtype=dtype),
        mask=mask,
        scale=0.3,
    )


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "mask",
    [
        AttentionMask(),
        AttentionMask(causal=True, query_offset=8),
        AttentionMask(causal=True, query_offset=3),
        AttentionMask(causal=True, query_offset=torch.tensor([0, 8, 4])),
        AttentionMask(key_lengths=torch.tensor([5, 0, 9], dtype=torch.int32)),
        AttentionMask(causal=True, query_offset=torch.tensor([5000, 8, 4])),
        AttentionMask(causal=True, query_offset=6, key_lengths=torch.tensor([5, 9, 7])),
    ],
)
def test_masks(mask: AttentionMask, dtype: torch.dtype) -> None:
    call = call_of(mask, dtype=dtype)
    with torch.no_grad():
        assert attention_selector().choose(call).name == "one_query"
        found, wanted = OneQueryAttention()(call), ReferenceAttention()(call)
    assert found.dtype == dtype and found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, atol=1e-6 if dtype == torch.float32 else 0.02, rtol=1e-5)


def test_lengths() -> None:
    assert seen_lengths(AttentionMask(), 2, 5) is None
    both = AttentionMask(causal=True, query_offset=3, key_lengths=torch.tensor([9, 2], dtype=torch.int32))
    found = seen_lengths(both, 2, 5)
    assert found is not None and found.tolist() == [4, 2] and found.dtype == torch.int64
    past = seen_lengths(AttentionMask(causal=True, query_offset=torch.tensor([5000, 3])), 2, 5)
    assert past is not None and past.tolist() == [5, 4]


@built
def test_what_it_refuses() -> None:
    one, backend = call_of(AttentionMask()), OneQueryAttention()
    tall = call_of(AttentionMask(), queries=2)
    narrow, window = call_of(AttentionMask(), width=12), call_of(AttentionMask(causal=True, query_offset=8, window=3))
    double = call_of(AttentionMask(), dtype=torch.float64)
    swapped = AttentionCall(queries=one.queries, keys=one.keys.mT.contiguous().mT, values=one.values, scale=1.0)
    elsewhere = AttentionCall(queries=one.queries.to("meta"), keys=one.keys, values=one.values, scale=1.0)
    shared = AttentionCall(queries=one.queries, keys=one.keys[:1], values=one.values[:1], scale=1.0)
    short = AttentionCall(queries=one.queries, keys=one.keys, values=one.values[:, :, :5], scale=1.0)
    with torch.no_grad():
        cases = (one, tall, narrow, window, double, swapped, elsewhere, shared, short)
        reasons = [backend.refuses(each) for each in cases]
    assert reasons == [
        None,
        "2 queries; it takes one",
        "head width 12 is not a multiple of 8",
        "a sliding window is not supported",
        "torch.float64 is not supported; float32 and bfloat16 are",
        "heads whose channels do not lie side by side",
        "no META kernels",
        "keys and values of other sizes, or for other rows",
        "keys and values of other sizes, or for other rows",
    ]
    one.queries.requires_grad_()
    assert "no gradients" in (backend.refuses(one) or "")


def test_where_it_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "IS_BUILT", False)
    call = call_of(AttentionMask())
    assert "needs a C compiler" in (OneQueryAttention().refuses(call) or "")
    assert attention_selector().choose(call).name == "sdpa"
