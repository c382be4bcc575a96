"""The guider of HunyuanVideo 1.5's folders: diffusers' classifier-free guidance with the scale of the checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.diffusers_config import FLAG, NUMBER, Kind, known_entries

CLASS_NAME = "ClassifierFreeGuidance"
GUIDER_CONFIG = "guider_config.json"
_KINDS: Mapping[str, Kind] = {
    "guidance_scale": NUMBER,
    "guidance_rescale": NUMBER,
    "use_original_formulation": FLAG,
    "start": NUMBER,
    "stop": NUMBER,
    "enabled": FLAG,
}


@dataclass(frozen=True, kw_only=True)
class Guider:
    """u + scale (c - u), rescaled; scale 1 stands for none."""

    scale: float = 6.0
    rescale: float = 0.0

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> "Guider":
        """From the entries of a guider_config.json; what is missing has diffusers' default.

        Raises:
            ValueError: another class of guider, or one that guides some of the steps, or by another formula.
        """
        read = {"guidance_scale": 7.5, "guidance_rescale": 0.0, "start": 0.0, "stop": 1.0, "enabled": True}
        read |= known_entries(entries, CLASS_NAME, _KINDS)
        for name, wanted in (("start", 0), ("stop", 1), ("use_original_formulation", False)):
            if read.get(name, wanted) != wanted:
                raise ValueError(
                    f"{GUIDER_CONFIG}: {name} is {read[name]}; only guiders where it is {wanted} can be used"
                )
        if not 0 <= read["guidance_rescale"] <= 1:
            raise ValueError(f"{GUIDER_CONFIG}: guidance_rescale is {read['guidance_rescale']}; it must be from 0 to 1")
        scale = read["guidance_scale"] if read["enabled"] else 1.0
        return cls(scale=float(scale), rescale=float(read["guidance_rescale"]))

    def entries(self) -> dict[str, Any]:
        """Those of a guider_config.json."""
        return {"_class_name": CLASS_NAME, "guidance_scale": self.scale, "guidance_rescale": self.rescale}
