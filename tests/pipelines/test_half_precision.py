"""bfloat16 on processors with and without products in it, in every family that has blocks."""

import copy
import dataclasses

import pytest
import torch
from parity import error, slopes

import calotype
from calotype.core.ops import row_product

from ..tiny_families import FAMILIES, SIZE, SIZES
from ..tiny_hunyuan_video import hunyuan_video_pipeline
from ..tiny_ltx_pipeline import ltx_pipeline
from ..tiny_wan_pipeline import wan_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CLIPS = {"hunyuan-video": hunyuan_video_pipeline, "ltx": ltx_pipeline, "wan": wan_pipeline}
CLIP_SIZE = (32, 32)


@pytest.fixture(scope="module", params=[*FAMILIES, *CLIPS])
def family(request, tmp_path_factory):
    """A folder, and what is asked for."""
    folder, is_clip = tmp_path_factory.mktemp("half") / request.param, request.param in CLIPS
    (CLIPS if is_clip else FAMILIES)[request.param](folder)
    height, width = CLIP_SIZE if is_clip else SIZES.get(request.param, SIZE)
    frames = {"num_frames": 5} if is_clip else {}
    return folder, {"height": height, "width": width, "max_sequence_length": 24, "num_inference_steps": 1, **frames}


@torch.no_grad()
def test_activations_are_float32_where_products_in_bfloat16_are_slow(family, monkeypatch):
    """Then only weights, and what is prepared of them, are rounded: closer to the same weights in float32 than with
    activations in bfloat16, and the results of both have one dtype."""
    folder, arguments = family
    whole, half = calotype.load(folder), calotype.load(folder, dtype="bfloat16")
    told = whole.encode(calotype.Request(prompt="two dogs", **arguments)).conditioning.positive
    told = dataclasses.replace(told, guidance=3.5) if getattr(whole.denoiser.config, "guided", False) else told
    x = torch.randn(whole("x", seed=1, progress=False, output_type="latent", **arguments).latents.shape)
    exact, found = copy.deepcopy(half.denoiser).float(), {}
    rounded = told.to(torch.device("cpu"), torch.bfloat16)
    for has_products in (False, True):
        monkeypatch.setattr(row_product, "_HAS_BFLOAT16", has_products)
        found[has_products], _ = slopes(half.denoiser, rounded, x)
    wanted, _ = slopes(exact, rounded.to(torch.device("cpu"), torch.float32), x)
    wide, narrow = (
        max(error(one, other) for one, other in zip(found[way], wanted, strict=True)) for way in (False, True)
    )
    assert wide < narrow and wide < 0.03
    assert all(slope.dtype is torch.float32 for way in found.values() for slope in way)
