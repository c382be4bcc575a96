"""Which backend a call gets, and every reason to refuse one."""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from calotype.core.attention.base import FULL, AttentionBackend, AttentionCall, AttentionMask, AttentionSelector
from calotype.core.attention.flash_attn import FlashAttention
from calotype.core.attention.flex import FlexAttention
from calotype.core.attention.registry import all_backends, attention_report, attention_selector
from calotype.core.attention.xformers import XFormersAttention

NAMES = ("reference", "sdpa", "flex", "flash_attn", "xformers", "one_query")


def make_call(
    mask: AttentionMask = FULL,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    width: int = 64,
    num_queries: int = 4,
    num_keys: int = 4,
    gradient: bool = False,
) -> AttentionCall:
    queries = torch.zeros(2, 4, num_queries, width, dtype=dtype, device=device, requires_grad=gradient)
    keys = torch.zeros(2, 4, num_keys, width, dtype=dtype, device=device)
    return AttentionCall(queries=queries, keys=keys, values=keys, mask=mask, scale=0.125)


def test_backends_and_their_order_of_preference() -> None:
    assert tuple(backend.name for backend in all_backends()) == NAMES
    preferred = [backend.name for backend in attention_selector().backends]
    assert preferred == ["one_query", "flash_attn", "xformers", "sdpa", "flex", "reference"]


def test_the_choice_on_a_cpu_is_sdpa() -> None:
    call = make_call()
    selector = attention_selector()
    assert selector.choose(call).name == "sdpa"
    others = {"flash_attn": "no CPU kernels", "xformers": "no CPU kernels"}
    assert selector.refusals(call) == others | {"one_query": "4 queries; it takes one"}
    torch.testing.assert_close(selector(call), torch.zeros_like(call.queries))


@pytest.mark.parametrize("name", ["reference", "sdpa", "flex"])
def test_a_named_backend_is_the_only_one(name: str) -> None:
    assert attention_selector(name).choose(make_call()).name == name


@pytest.mark.parametrize("name", ["flash_attn", "xformers"])
def test_the_refusal_of_a_named_backend_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=rf"no attention backend can run this call \({name}: no CPU kernels\)"):
        attention_selector(name)(make_call())


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'sage'.*reference, sdpa, flex, flash_attn, xformers"):
        attention_selector("sage")


def test_the_report_names_every_backend() -> None:
    report = attention_report("cpu", torch.float32)
    others = {"flash_attn": "no CPU kernels", "xformers": "no CPU kernels", "one_query": "64 queries; it takes one"}
    assert report == dict.fromkeys(NAMES[:3]) | others
    assert attention_report(torch.device("meta"), torch.float32)["flex"] == "no META kernels"


def test_the_report_of_a_missing_device_is_an_error() -> None:
    with pytest.raises(ValueError, match="device 'cuda:99' is not available"):
        attention_report("cuda:99", torch.float32)


@pytest.mark.parametrize("backend", all_backends(), ids=lambda backend: backend.name)
def test_optional_packages_are_imported_inside_functions_only(backend: AttentionBackend) -> None:
    module = sys.modules[type(backend).__module__]
    statements = ast.parse(inspect.getsource(module)).body
    imported = {node.module for node in statements if isinstance(node, ast.ImportFrom) and node.level == 0}
    imported |= {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    standard = {"collections.abc", "functools", "importlib", "importlib.util", "typing", "weakref"}
    assert imported <= standard | {"torch", "torch.nn"}


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every package is installed, and CUDA tensors can be described (not computed with)."""
    for module in ("flash_attn", "xformers", "flex"):
        monkeypatch.setattr(
            f"calotype.core.attention.{module}.find_spec", lambda name: importlib.util.find_spec("torch")
        )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


AT_END = "a causal offset is supported only where the queries are the last of the keys, alike in all rows"
LENGTHS = torch.tensor([2, 4])
CASES: list[tuple[type[AttentionBackend], Callable[[], AttentionCall], str | None]] = [
    (FlashAttention, lambda: make_call(device="cuda"), None),
    (FlashAttention, lambda: make_call(AttentionMask(causal=True), device="cuda", gradient=True), None),
    (FlashAttention, lambda: make_call(AttentionMask(causal=True, query_offset=3), device="cuda", num_keys=7), None),
    (FlashAttention, lambda: make_call(AttentionMask(key_lengths=LENGTHS), device="cuda"), None),
    (
        FlashAttention,
        lambda: make_call(device="cuda", dtype=torch.float32),
        "torch.float32 is not supported; float16 and bfloat16 are",
    ),
    (FlashAttention, lambda: make_call(device="cuda", width=264), "head width 264 is not a multiple of 8 up to 256"),
    (FlashAttention, lambda: make_call(device="cuda", width=36), "head width 36 is not a multiple of 8 up to 256"),
    (FlashAttention, lambda: make_call(AttentionMask(causal=True), device="cuda", num_keys=7), AT_END),
    (FlashAttention, lambda: make_call(AttentionMask(causal=True, query_offset=LENGTHS), device="cuda"), AT_END),
    (
        FlashAttention,
        lambda: make_call(AttentionMask(causal=True, key_lengths=LENGTHS), device="cuda"),
        "key lengths together with a causal mask are not supported",
    ),
    (
        FlashAttention,
        lambda: make_call(AttentionMask(key_lengths=LENGTHS), device="cuda", gradient=True),
        "key lengths are not supported with gradients",
    ),
    (
        FlashAttention,
        lambda: make_call(AttentionMask(causal=True, window=2), device="cuda"),
        "a sliding window is not supported",
    ),
    (
        XFormersAttention,
        lambda: make_call(AttentionMask(causal=True, window=2), device="cuda"),
        "a sliding window is not supported",
    ),
    (FlashAttention, lambda: make_call(AttentionMask(causal=True, window=99), device="cuda"), None),
    (XFormersAttention, lambda: make_call(AttentionMask(causal=True, window=99), device="cuda"), None),
    (XFormersAttention, lambda: make_call(device="cuda", dtype=torch.float32), None),
    (XFormersAttention, lambda: make_call(AttentionMask(causal=True, query_offset=3), device="cuda", num_keys=7), None),
    (
        XFormersAttention,
        lambda: make_call(device="cuda", dtype=torch.float64),
        "torch.float64 is not supported; float16, bfloat16 and float32 are",
    ),
    (XFormersAttention, lambda: make_call(device="cuda", width=36), "head width 36 is not a multiple of 8"),
    (
        XFormersAttention,
        lambda: make_call(AttentionMask(key_lengths=LENGTHS), device="cuda"),
        "key lengths are not supported",
    ),
    (XFormersAttention, lambda: make_call(AttentionMask(causal=True), device="cuda", num_keys=7), AT_END),
    (FlexAttention, lambda: make_call(device="cuda", gradient=True), None),
    (FlexAttention, lambda: make_call(gradient=True), "no gradients on a CPU"),
    (FlexAttention, lambda: make_call(device="meta"), "no META kernels"),
    (FlexAttention, lambda: make_call(device="cuda", width=8), "head width 8 is less than 16"),
    (
        FlexAttention,
        lambda: make_call(device="cuda", dtype=torch.float64),
        "torch.float64 is not supported; float16, bfloat16 and float32 are",
    ),
]


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("case", range(len(CASES)))
def test_refusals(case: int) -> None:
    backend, call, reason = CASES[case]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert backend().refuses(call()) == reason


def test_what_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn", "xformers", "flex"):
        monkeypatch.setattr(f"calotype.core.attention.{module}.find_spec", lambda name: None)
    with FakeTensorMode():
        call = make_call(device="cuda")
        reasons = AttentionSelector(backends=all_backends()).refusals(call)
    assert reasons == {
        "flash_attn": "not installed (pip install flash-attn)",
        "xformers": "not installed (pip install xformers)",
        "flex": "Triton is not installed",
        "one_query": "4 queries; it takes one",
    }


@pytest.mark.usefixtures("on_cuda")
def test_flash_attn_refuses_old_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with FakeTensorMode():
        reason = FlashAttention().refuses(make_call(device="cuda"))
    assert reason == "the GPU is older than compute capability 8.0"


def test_no_gradient_is_needed_where_none_is_recorded() -> None:
    call = make_call(gradient=True)
    assert call.needs_gradient
    with torch.no_grad():
        assert not call.needs_gradient
        assert FlexAttention().refuses(call) is None
