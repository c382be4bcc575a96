"""Arguments of diffusers that have another name here, or none: the error says what stands for them."""

import inspect
import re
from typing import Any

import pytest
from fakes import fake_pipeline
from repository import ROOT

import calotype
from calotype.pipelines.arguments import PUBLIC_ARGUMENTS
from calotype.pipelines.from_diffusers import IN_CALLS, IN_LOADING

SAID = {
    "callback_on_step_end": "on_step=",
    "callback_on_step_end_tensor_inputs": "on_step=",
    "timesteps": "schedule=",
    "prompt_embeds": "conditioning=",
    "negative_prompt_embeds": "conditioning=",
    "pooled_prompt_embeds": "conditioning=",
    "return_dict": "leave it out",
    "cross_attention_kwargs": "attention=",
    "joint_attention_kwargs": "attention=",
    "torch_dtype": "dtype=",
    "use_safetensors": "leave it out",
    "low_cpu_mem_usage": "leave it out",
    "device_map": "device=",
}
"""What the message names, and docs/diffusers.md beside the argument, where "leave it out" is "nothing"."""


@pytest.mark.parametrize("name", IN_CALLS)
@pytest.mark.parametrize("way", ["__call__", "stream"])
def test_in_calls(name: str, way: str) -> None:
    pipe: Any = fake_pipeline()
    with pytest.raises(ValueError) as error:
        vars(type(pipe))[way](pipe, "a fox", **{name: None})
    assert str(error.value) == f"{name}: not an argument here; {IN_CALLS[name]}"


@pytest.mark.parametrize("name", IN_LOADING)
def test_in_loading(name: str) -> None:
    load: Any = calotype.load
    with pytest.raises(TypeError) as error:
        load(**{name: None})
    assert str(error.value) == f"load() got an unexpected keyword argument {name!r}: {IN_LOADING[name]}"


def test_the_signature_of_load_stays() -> None:
    found = inspect.signature(calotype.load).parameters
    assert [*found][:2] == ["source", "family"]
    assert all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in found.values())
    assert not {*found} & {*IN_LOADING}
    load: Any = calotype.load
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'colour'$"):
        load(colour="red")


def test_nothing_that_is_an_argument_is_refused() -> None:
    assert not {*IN_CALLS} & PUBLIC_ARGUMENTS


@pytest.mark.parametrize("name", SAID)
def test_the_docs_say_the_same(name: str) -> None:
    rows = (ROOT / "docs/diffusers.md").read_text(encoding="utf-8").splitlines()
    (row,) = (line for line in rows if line.startswith("|") and re.search(rf"(?<!\w){name}=", line.split(" | ")[0]))
    assert SAID[name] in {**IN_CALLS, **IN_LOADING}[name]
    assert SAID[name].replace("leave it out", "nothing: ") in row.split(" | ")[1]
