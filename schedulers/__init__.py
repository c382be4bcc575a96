"""Sigma schedules, per-image noise and samplers. Imports torch only.

A schedule says where to evaluate, a sampler how to get from one point to the next; neither knows any model.
"""

from .base import Noise, Path, Point, Sampler, Schedule, Slope, State, Step
from .noise import RowNoise
from .samplers import DPMPP2M, Euler, EulerAncestral, Heun, sampler_by_name, sampler_names
from .schedules import (
    exploding_schedule,
    exploding_schedule_from_sigmas,
    exponential_shift_sigma,
    flow_schedule,
    flow_schedule_from_sigmas,
    shift_sigma,
)

__all__ = [
    "DPMPP2M",
    "Euler",
    "EulerAncestral",
    "Heun",
    "Noise",
    "Path",
    "Point",
    "RowNoise",
    "Sampler",
    "Schedule",
    "Slope",
    "State",
    "Step",
    "exploding_schedule",
    "exploding_schedule_from_sigmas",
    "exponential_shift_sigma",
    "flow_schedule",
    "flow_schedule_from_sigmas",
    "sampler_by_name",
    "sampler_names",
    "shift_sigma",
]
