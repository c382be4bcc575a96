"""Words to pictures and text, over one transformer core.

    import calotype

    pipe = calotype.load()
    pipe("a fox on a beach", seed=7).images[0].save("fox.png")

Names are imported when they are first used, so that `import calotype` itself is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from .denoisers.base import Conditioning, Prompt
    from .denoisers.causal import Chunks
    from .denoisers.guidance import ClassifierFree, Guidance, Unguided
    from .language.conversation import Conversation
    from .language.text import Completion, TextModel
    from .pipelines.base import Cancelled, Encoded, ImageStep
    from .pipelines.causal import causal
    from .pipelines.clips import read_clip
    from .pipelines.conditions import Condition
    from .pipelines.files import read_manifest
    from .pipelines.finite import NonFiniteError
    from .pipelines.image import ImagePipeline
    from .pipelines.load import load
    from .pipelines.load_text import load_language_model
    from .pipelines.manifest import Manifest
    from .pipelines.replay import replay
    from .pipelines.request import Request
    from .pipelines.result import Result
    from .pipelines.state import load_state, save_state
    from .schedulers import (
        DPMPP2M,
        Euler,
        EulerAncestral,
        Heun,
        Schedule,
        State,
        Step,
        flow_schedule,
        flow_schedule_from_sigmas,
        sampler_by_name,
    )

__all__ = [
    "DPMPP2M",
    "Cancelled",
    "Chunks",
    "ClassifierFree",
    "Completion",
    "Condition",
    "Conditioning",
    "Conversation",
    "Encoded",
    "Euler",
    "EulerAncestral",
    "Guidance",
    "Heun",
    "ImagePipeline",
    "ImageStep",
    "Manifest",
    "NonFiniteError",
    "Prompt",
    "Request",
    "Result",
    "Schedule",
    "State",
    "Step",
    "TextModel",
    "Unguided",
    "__version__",
    "causal",
    "flow_schedule",
    "flow_schedule_from_sigmas",
    "load",
    "load_language_model",
    "load_state",
    "read_clip",
    "read_manifest",
    "replay",
    "sampler_by_name",
    "save_state",
]

_MODULES = {
    "denoisers.base": "Conditioning Prompt",
    "denoisers.causal": "Chunks",
    "denoisers.guidance": "ClassifierFree Guidance Unguided",
    "pipelines.base": "Cancelled Encoded ImageStep",
    "pipelines.causal": "causal",
    "pipelines.clips": "read_clip",
    "pipelines.conditions": "Condition",
    "pipelines.files": "read_manifest",
    "pipelines.finite": "NonFiniteError",
    "pipelines.image": "ImagePipeline",
    "language.completion": "Completion",
    "language.conversation": "Conversation",
    "language.text": "TextModel",
    "pipelines.load": "load",
    "pipelines.load_text": "load_language_model",
    "pipelines.manifest": "Manifest",
    "pipelines.replay": "replay",
    "pipelines.request": "Request",
    "pipelines.result": "Result",
    "pipelines.state": "load_state save_state",
    "schedulers": "Schedule State Step flow_schedule flow_schedule_from_sigmas",
    "schedulers.samplers": "DPMPP2M Euler EulerAncestral Heun sampler_by_name",
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names.split():
            value: object = vars(import_module(f"{__name__}.{module}"))[name]
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
