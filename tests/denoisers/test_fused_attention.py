"""On a CPU, denoisers' attention is torch's fused kernel, also where rows are of different lengths."""

from collections import Counter
from typing import Any

import pytest
import tiny_hunyuan_video
import tiny_wan
import torch
from pairs import Kind, clip_noise
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from calotype.core.attention.registry import attention_selector
from calotype.denoisers.base import Conditioning
from calotype.denoisers.hunyuan_video import HunyuanVideoDenoiser
from calotype.denoisers.hunyuan_video_config import HunyuanVideoConfig
from calotype.denoisers.hunyuan_video_keys import hunyuan_video_key_map
from calotype.denoisers.wan import WanDenoiser
from calotype.denoisers.wan_config import WanConfig
from calotype.denoisers.wan_keys import wan_key_map
from calotype.schedulers import flow_schedule

WAN = Kind(denoiser=WanDenoiser, config=WanConfig, key_map=wan_key_map())
HUNYUAN = Kind(denoiser=HunyuanVideoDenoiser, config=HunyuanVideoConfig, key_map=hunyuan_video_key_map())
FUSED, CLIP = "_scaled_dot_product_flash_attention_for_cpu", (2, (4, 6))


class Operations(TorchDispatchMode):
    """Inside it, `found` counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def drawn(rows, length, width, seed=0):
    return torch.randn(rows, length, width, generator=torch.Generator().manual_seed(seed))


def told_wan():
    return Conditioning(states=drawn(2, 9, 20), lengths=torch.tensor([3, 9]))


def told_hunyuan():
    return Conditioning(
        states=drawn(2, 9, 32),
        lengths=torch.tensor([3, 9]),
        other_states=drawn(2, 4, 20, seed=1),
        other_lengths=torch.tensor([4, 0]),
    )


def attention_of_a_slope(model, told, attention=None):
    """How often the fused kernel runs, and how often a softmax does, which it leaves no trace of."""
    x, points = clip_noise(2, CLIP), flow_schedule(1).points[:-1]
    prepared = model.prepare(told, tuple(x.shape), points, attention=attention_selector(attention))
    with torch.no_grad(), Operations() as operations:
        assert model.slope(x, prepared, points[0]).isfinite().all()
    found = operations.found
    return found[FUSED], sum(count for name, count in found.items() if "softmax" in name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "made", "told"),
    [
        (WAN, tiny_wan.wan_transformer, told_wan),
        (HUNYUAN, tiny_hunyuan_video.hunyuan_video_transformer, told_hunyuan),
    ],
    ids=["wan", "hunyuan"],
)
def test_every_attention_is_fused(tmp_path, kind, made, told, dtype):
    """Those of both blocks with themselves and with the text, or of both and of two refiners. What other ways show is
    what must not be there."""
    model, told = kind.pair(made(), tmp_path).lean(dtype), told().to(torch.device("cpu"), dtype)
    assert attention_of_a_slope(model, told) == (4, 0)
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_of_a_slope(model, told) == (0, 4)
    assert attention_of_a_slope(model, told, "reference") == (0, 4)
