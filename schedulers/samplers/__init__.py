"""One file per sampler, and their names."""

from ..base import Sampler
from .ddim import DDIM
from .dpmpp_2m import DPMPP2M
from .euler import Euler
from .euler_ancestral import EulerAncestral
from .heun import Heun
from .lcm import LCM
from .pndm import PNDM
from .unipc import UniPC

__all__ = [
    "DDIM",
    "DPMPP2M",
    "LCM",
    "PNDM",
    "Euler",
    "EulerAncestral",
    "Heun",
    "UniPC",
    "sampler_by_name",
    "sampler_classes",
    "sampler_names",
]


def sampler_by_name(name: str) -> Sampler:
    """The sampler of that name, with its defaults.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    makers = _makers()
    if name not in makers:
        raise ValueError(f"unknown sampler {name!r}: known are {', '.join(makers)}")
    return makers[name]()


def sampler_classes() -> tuple[type[Sampler], ...]:
    """The class of every sampler that has a name."""
    return tuple(_makers().values())


def sampler_names() -> tuple[str, ...]:
    """Every name that `sampler_by_name` knows."""
    return tuple(_makers())


def _makers() -> dict[str, type[Sampler]]:
    return {
        "euler": Euler,
        "heun": Heun,
        "dpmpp_2m": DPMPP2M,
        "euler_ancestral": EulerAncestral,
        "ddim": DDIM,
        "pndm": PNDM,
        "lcm": LCM,
        "unipc": UniPC,
    }
