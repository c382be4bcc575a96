"""What is said about arguments that a model was not made for: steps, negative scales, no picture."""

from pathlib import Path
from typing import Any

import pytest
from fakes import fake_pipeline

import calotype
from calotype.pipelines.causal import CausalWanFamily
from calotype.pipelines.discrete import ScaledGuidance
from calotype.pipelines.few_steps import many_steps
from calotype.pipelines.flux import SCHEDULERS, FluxFamily
from calotype.pipelines.flux2 import Flux2Family
from calotype.pipelines.qwen_image_edit import QwenImageEditFamily
from calotype.pipelines.sd3 import SD3Family
from calotype.pipelines.wan import SCHEDULER, WanFamily
from calotype.pipelines.z_image import ZImageFamily
from calotype.schedulers.flow_match import FlowMatchConfig
from calotype.schedulers.self_forcing import SelfForcingConfig

FLOW = FlowMatchConfig()
SCHNELL = FluxFamily(scheduler=SCHEDULERS[False], guided=False)
TURBO = ZImageFamily(scheduler=FLOW, most_tokens=512, turbo=True)
EDIT_PLUS = QwenImageEditFamily(scheduler=FLOW)


def said(family: Any, **arguments: Any) -> tuple[str, ...]:
    return family.warnings(calotype.Request(prompt="a fox", **arguments))


@pytest.mark.parametrize(
    ("family", "made"),
    [
        (SCHNELL, 4),
        (Flux2Family(scheduler=FLOW, kind="klein"), 4),
        (SD3Family(scheduler=FLOW, text_width=8, distilled=True), 4),
        (TURBO, 8),
    ],
)
def test_many_more_steps_than_a_model_was_made_for(family: Any, made: int) -> None:
    assert said(family, num_inference_steps=50) == (f"num_inference_steps 50: this model was made for {made}",)
    assert [said(family, num_inference_steps=steps) for steps in (1, made, made + 1, 2 * made)] == [()] * 4
    assert said(family) == ()


def test_models_of_many_steps_are_told_nothing() -> None:
    dev = FluxFamily(scheduler=SCHEDULERS[True], guided=True)
    base = Flux2Family(scheduler=FLOW, kind="klein base")
    for family in (dev, base, SD3Family(scheduler=FLOW, text_width=8, distilled=False)):
        assert said(family, num_inference_steps=200) == ()
    assert many_steps(calotype.Request(prompt="a", num_inference_steps=9), 4) != ()


@pytest.mark.parametrize(
    ("family", "line"),
    [
        (SCHNELL, "guidance_scale -2.0 has no effect: this model was made to run without"),
        (Flux2Family(scheduler=FLOW, kind="klein"), "guidance_scale -2.0 has no effect: this model was made to run"),
        (Flux2Family(scheduler=FLOW, kind="klein base"), "guidance_scale -2.0 has no effect: it begins above 1"),
        (
            SD3Family(scheduler=FLOW, text_width=8, distilled=False),
            "guidance_scale -2.0 has no effect: it begins above 1",
        ),
        (ScaledGuidance(told=False), "guidance_scale -2.0 has no effect: it begins above 1"),
        (WanFamily(scheduler=SCHEDULER), "guidance_scale -2.0 has no effect: it begins above 1"),
        (TURBO, "guidance_scale -2.0 has no effect: it begins above 0; give guidance=ClassifierFree(-1.0)"),
        (EDIT_PLUS, "guidance_scale -2.0 has no effect: it begins above 1"),
        (CausalWanFamily(scheduler=SelfForcingConfig()), "guidance_scale -2.0 has no effect: this model runs without"),
    ],
)
def test_negative_scales_that_do_nothing(family: Any, line: str) -> None:
    found = said(family, guidance_scale=-2.0)
    assert found[0].startswith(line)
    assert not any("guidance_scale" in each for each in found[1:])


def test_negative_scales_that_lead_away() -> None:
    (line,) = fake_pipeline()("a fox", guidance_scale=-2.0).warnings
    assert line == "guidance_scale -2.0 is negative: it leads away from the prompt"
    experts = WanFamily(scheduler=SCHEDULER, boundary=0.9)
    (line,) = said(experts, guidance_scale=3.0, guidance_scale_2=-1.0)
    assert line == "guidance_scale_2 -1.0 is negative: it leads away from the prompt"
    given = calotype.ClassifierFree(-2.0)  # an object says what it is
    assert fake_pipeline()("a fox", guidance=given).warnings == ()


def test_an_editing_model_without_a_picture() -> None:
    assert said(EDIT_PLUS) == ("image: this model changes pictures, and there is none",)
    assert said(EDIT_PLUS, image="fox.png") == ()


def test_equal_neighbours_are_named() -> None:
    with pytest.raises(ValueError, match=r"sigmas\[1\] and sigmas\[2\] are both 0.5; noise levels must fall"):
        calotype.Request(prompt="a", sigmas=[1.0, 0.5, 0.5, 0.25])
    calotype.Request(prompt="a", sigmas=[1.0, 0.5, 0.25])


def test_a_path_that_looks_like_an_id() -> None:
    with pytest.raises(FileNotFoundError, match="if a hub id is meant, give 'owner/name', a string"):
        calotype.load(Path("owner/name"))
    with pytest.raises(FileNotFoundError, match="not a hub id such as"):
        calotype.load(Path("owner/name/more"))
