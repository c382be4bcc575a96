"""A tiny random checkpoint of each family that has blocks, saved as diffusers saves it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .tiny_flux import flux_pipeline
from .tiny_flux2 import flux2_pipeline
from .tiny_qwen_image import qwen_image_pipeline
from .tiny_sd3 import sd3_pipeline
from .tiny_z_image import TURBO, z_image_pipeline

FAMILIES: dict[str, Callable[[Path], Any]] = {
    "flux": lambda folder: flux_pipeline(True, folder),
    "flux2": lambda folder: flux2_pipeline("klein base", folder),
    "qwen-image": qwen_image_pipeline,
    "sd3": lambda folder: sd3_pipeline("medium", folder),
    "z_image": lambda folder: z_image_pipeline(TURBO, folder),
}
"""Makes the checkpoint in a folder, and gives diffusers' pipeline of it."""
SIZES = {"flux2": (32, 48)}
"""Heights and widths that a family can make, where they are not `SIZE`."""
SIZE = (24, 40)
