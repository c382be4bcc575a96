"""From a checkpoint's scheduler_config.json to our sampler and schedules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from .base import Sampler, Schedule
from .discrete import DISCRETE, DiscreteConfig, discrete_schedule
from .entries import Entries
from .flow_match import FLOW_MATCH, FlowMatchConfig, flow_match_schedule
from .samplers import DDIM, DPMPP2M, LCM, PNDM, Euler, EulerAncestral, UniPC
from .unipc import UNIPC, UniPCConfig, unipc_schedule


class ScheduleMaker(Protocol):
    """A checkpoint's schedule of any length."""

    def __call__(
        self, num_steps: int, *, num_image_tokens: int | None = None, sigmas: Sequence[float] | None = None
    ) -> Schedule:
        """What diffusers' `set_timesteps` makes; only dynamic shifting looks at `num_image_tokens`."""
        ...


def sampler_for(entries: Mapping[str, object]) -> tuple[Sampler, ScheduleMaker]:
    """The sampler and the schedules that the entries of a scheduler_config.json name.

    Raises:
        ValueError: a scheduler that is not supported (the message lists those that are), an option that changes the
            result and that there is nothing for here, or a bad value.
    """
    scheduler = Entries.of(entries, scheduler_names()).scheduler
    if scheduler == FLOW_MATCH:
        return Euler(), _flow_schedules(FlowMatchConfig.from_entries(entries))
    if scheduler == UNIPC:
        multistep = UniPCConfig.from_entries(entries)
        return UniPC(order=multistep.solver_order), _unipc_schedules(multistep)
    config = DiscreteConfig.from_entries(entries)
    return _samplers()[config.scheduler](config), _discrete_schedules(config)


def scheduler_names() -> tuple[str, ...]:
    """Every class of diffusers that `sampler_for` knows."""
    return (*DISCRETE, FLOW_MATCH, UNIPC)


def _samplers() -> dict[str, Callable[[DiscreteConfig], Sampler]]:
    return {
        "EulerDiscreteScheduler": lambda config: Euler(),
        "EulerAncestralDiscreteScheduler": lambda config: EulerAncestral(),
        "DDIMScheduler": lambda config: DDIM(),
        "PNDMScheduler": lambda config: PNDM(),
        "DPMSolverMultistepScheduler": lambda config: DPMPP2M(),
        "LCMScheduler": lambda config: LCM(timestep_scaling=config.timestep_scaling),
    }


def _flow_schedules(config: FlowMatchConfig) -> ScheduleMaker:
    def make(num_steps: int, *, num_image_tokens: int | None = None, sigmas: Sequence[float] | None = None) -> Schedule:
        return flow_match_schedule(config, num_steps, num_image_tokens=num_image_tokens, sigmas=sigmas)

    return make


def _unipc_schedules(config: UniPCConfig) -> ScheduleMaker:
    def make(num_steps: int, *, num_image_tokens: int | None = None, sigmas: Sequence[float] | None = None) -> Schedule:
        return unipc_schedule(config, num_steps, sigmas=sigmas)

    return make


def _discrete_schedules(config: DiscreteConfig) -> ScheduleMaker:
    def make(num_steps: int, *, num_image_tokens: int | None = None, sigmas: Sequence[float] | None = None) -> Schedule:
        return discrete_schedule(config, num_steps, sigmas=sigmas)

    return make
