"""How every sampler begins and reports a step."""

import torch
from torch import Tensor

from ..base import Noise, Schedule, State, Step


def begin(
    x: Tensor, schedule: Schedule, noise: Noise, state: State | None, num_history: int = 0
) -> tuple[Tensor, int, tuple[Tensor, ...]]:
    """Float32 latents, the first step to take and the history: a new run, or `state`'s (which also restores `noise`).

    Raises:
        ValueError: the state is not of this shape, schedule or sampler (which keeps `num_history` tensors of history).
    """
    if state is None:
        return x.to(torch.float32), 0, ()
    if state.latents.shape != x.shape:
        raise ValueError(f"the state's latents are {list(state.latents.shape)}, this run's are {list(x.shape)}")
    if not 1 <= state.index <= schedule.num_steps:
        raise ValueError(f"the state was saved after step {state.index}, this schedule has 1..{schedule.num_steps}")
    if len(state.history) != num_history:
        raise ValueError(
            f"the state holds {len(state.history)} tensors of history, this sampler keeps {num_history}: "
            "another sampler saved it"
        )
    for tensor in state.history:
        if tensor.shape != x.shape:
            raise ValueError(f"the state's history has shape {list(tensor.shape)}, this run has {list(x.shape)}")
    noise.restore(state.noise)
    latents, *history = (tensor.to(x.device, torch.float32) for tensor in (state.latents, *state.history))
    return latents, state.index, tuple(history)


def check_eta(eta: float) -> None:
    """Refuse a share of noise outside [0, 1] with a ValueError."""
    if not 0.0 <= eta <= 1.0:
        raise ValueError(f"eta must lie in [0, 1], got {eta:g}")


def step_done(
    i: int, x: Tensor, denoised: Tensor, schedule: Schedule, noise: Noise, history: tuple[Tensor, ...] = ()
) -> Step:
    """What is yielded once step `i` has led to `x`."""
    return Step(
        index=i,
        total=schedule.num_steps,
        sigma=schedule.points[i + 1].sigma,
        latents=x,
        denoised=denoised,
        state=State(index=i + 1, latents=x, history=history, noise=noise.state()),
    )
