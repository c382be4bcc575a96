import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fakes import FakeDenoiser, fake_pipeline

from calotype.pipelines.base import Cancelled, ImageStep, last
from calotype.pipelines.image import ImagePipeline
from calotype.pipelines.request import Request
from calotype.pipelines.state import load_state, save_state
from calotype.schedulers import sampler_names
from calotype.schedulers.base import State


@pytest.fixture
def pipe() -> ImagePipeline:
    return fake_pipeline()


@pytest.mark.parametrize("at", range(5))
def test_cancelled_within_a_step_and_not_decoded(pipe: ImagePipeline, at: int):
    cancel, seen = threading.Event(), list[int]()

    def stop(step: ImageStep) -> None:
        seen.append(step.index)
        if step.index == at:
            cancel.set()

    with pytest.raises(Cancelled) as caught:
        pipe("a", num_inference_steps=5, on_step=stop, cancel=cancel)
    assert seen == list(range(at + 1))
    assert caught.value.step is not None and caught.value.step.index == at
    assert f"after step {at + 1} of 5" in str(caught.value)
    assert pipe.vae.decodes == 0  # type: ignore[attr-defined]


def test_cancelled_before_the_first_step(pipe: ImagePipeline):
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled, match="before its first step") as caught:
        pipe("a", cancel=cancel)
    assert caught.value.step is None
    assert isinstance(pipe.denoiser, FakeDenoiser) and not pipe.denoiser.prepares


def test_a_cancelled_run_leaves_nothing_and_can_go_on(pipe: ImagePipeline):
    request = Request(prompt="a red fox", seed=3, sampler="dpmpp_2m", num_inference_steps=5)
    expected = last(fake_pipeline().denoise(fake_pipeline().encode(request)))
    cancel, encoded = threading.Event(), pipe.encode(request)
    steps = pipe.denoise(encoded, cancel=cancel)
    next(steps), next(steps)
    cancel.set()
    with pytest.raises(Cancelled) as caught:
        next(steps)
    assert caught.value.step is not None
    resumed = last(pipe.denoise(encoded, resume=caught.value.step.state))
    assert torch.equal(resumed.latents, expected.latents)
    assert torch.equal(last(pipe.denoise(encoded)).latents, expected.latents)


@pytest.mark.parametrize("sampler", sampler_names())
@pytest.mark.parametrize("done", [1, 3, 4])
def test_resume_is_bit_equal(pipe: ImagePipeline, sampler: str, done: int, tmp_path: Path):
    arguments: Any = {"num_images_per_prompt": 2, "seed": 3, "sampler": sampler, "num_inference_steps": 4}
    steps = list(pipe.stream("a red fox", **arguments))
    path = save_state(steps[done - 1].state, tmp_path / "state.safetensors")
    other = fake_pipeline()
    encoded = other.encode(Request(prompt="a red fox", **arguments))
    left = list(other.denoise(encoded, resume=load_state(path)))
    assert [step.index for step in left] == (list(range(done, 4)) or [3])
    assert torch.equal(left[-1].latents, steps[-1].latents)
    assert other.decode(left[-1]).pil()[1].tobytes() == pipe.decode(steps[-1]).pil()[1].tobytes()


SCRIPT = """
import sys, torch
from calotype.pipelines.base import last
from calotype.pipelines.request import Request
from calotype.pipelines.state import load_state, save_state
from fakes import fake_pipeline
pipe = fake_pipeline()
encoded = pipe.encode(Request(prompt="a red fox", seed=3, sampler="euler_ancestral", num_inference_steps=5))
save_state(last(pipe.denoise(encoded, resume=load_state(sys.argv[1]))).state, sys.argv[2])
"""


def test_resume_in_another_process(pipe: ImagePipeline, tmp_path: Path):
    steps = list(pipe.stream("a red fox", seed=3, sampler="euler_ancestral", num_inference_steps=5))
    saved, result = save_state(steps[2].state, tmp_path / "a"), tmp_path / "b"
    folders = [str(Path(__file__).parents[1]), *(path for path in sys.path if path)]
    code = f"import sys; sys.path[:0] = {folders!r}\n{SCRIPT}"
    subprocess.run([sys.executable, "-c", code, str(saved), str(result)], check=True, timeout=120)
    assert torch.equal(load_state(result).latents, steps[-1].latents)


def test_a_state_of_another_run_is_refused(pipe: ImagePipeline, tmp_path: Path):
    state = last(pipe.stream("a", num_inference_steps=4)).state
    with pytest.raises(ValueError, match=r"\(1, 4, 1, 4, 4\), this run has \(2, 4, 1, 4, 4\)"):
        pipe.denoise(pipe.encode(Request(prompt=["a", "b"])), resume=state)
    with pytest.raises(ValueError, match="saved after step 4, this run has 2 steps"):
        pipe.denoise(pipe.encode(Request(prompt="a", num_inference_steps=2)), resume=state)
    with pytest.raises(ValueError, match="history"):
        encoded = pipe.encode(Request(prompt="a", num_inference_steps=5, sampler="dpmpp_2m"))
        next(pipe.denoise(encoded, resume=state))


def test_damaged_state_files(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"not a state at all, by any means, whatever is said")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_state(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_state(tmp_path / "nowhere")
    state = State(index=1, latents=torch.zeros(1), history=(), noise=())
    with pytest.raises(FileNotFoundError, match="no such folder"):
        save_state(state, tmp_path / "nowhere" / "a")
    with pytest.raises(ValueError, match=r"state is 3; it must be the state of a step \(step.state\)"):
        save_state(cast(Any, 3), tmp_path / "b")
