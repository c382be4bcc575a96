"""Sigma schedules, per-image noise and samplers. Imports torch only.

A schedule says where to evaluate, a sampler how to get from one point to the next; neither knows any model.
"""

from .base import Noise, Path, Point, Sampler, Schedule, Slope, State, Step
from .checkpoint import ScheduleMaker, sampler_for, scheduler_names
from .discrete import DiscreteConfig, discrete_schedule, final_latent_scale, initial_noise_scale, latent_scale
from .flow_match import FlowMatchConfig, even_sigmas, flow_match_schedule, flux2_mu, image_mu
from .noise import RowNoise
from .samplers import (
    DDIM,
    DPMPP2M,
    LCM,
    PNDM,
    Euler,
    EulerAncestral,
    Heun,
    UniPC,
    sampler_by_name,
    sampler_classes,
    sampler_names,
)
from .schedules import (
    exploding_schedule,
    exploding_schedule_from_sigmas,
    exponential_shift_sigma,
    flow_schedule,
    flow_schedule_from_sigmas,
    shift_sigma,
)
from .unipc import UniPCConfig, unipc_schedule

__all__ = [
    "DDIM",
    "DPMPP2M",
    "LCM",
    "PNDM",
    "DiscreteConfig",
    "Euler",
    "EulerAncestral",
    "FlowMatchConfig",
    "Heun",
    "Noise",
    "Path",
    "Point",
    "RowNoise",
    "Sampler",
    "Schedule",
    "ScheduleMaker",
    "Slope",
    "State",
    "Step",
    "UniPC",
    "UniPCConfig",
    "discrete_schedule",
    "even_sigmas",
    "exploding_schedule",
    "exploding_schedule_from_sigmas",
    "exponential_shift_sigma",
    "final_latent_scale",
    "flow_match_schedule",
    "flow_schedule",
    "flow_schedule_from_sigmas",
    "flux2_mu",
    "image_mu",
    "initial_noise_scale",
    "latent_scale",
    "sampler_by_name",
    "sampler_classes",
    "sampler_for",
    "sampler_names",
    "scheduler_names",
    "shift_sigma",
    "unipc_schedule",
]
