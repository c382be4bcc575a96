"""Tiny random pipelines of Wan's causal kind, as FastVideo's folders have them."""

import json
from pathlib import Path
from typing import Any

from tiny_wan_pipeline import wan_pipeline

SCHEDULER: dict[str, Any] = {
    "_class_name": "SelfForcingFlowMatchScheduler",
    "_diffusers_version": "0.33.0.dev0",
    "num_inference_steps": 1000,
    "shift": 5.0,
    "sigma_min": 0.0,
    "extra_one_step": True,
    "training": True,
}


def causal_folder(folder: Path, kind: str = "text", **entries: Any) -> Any:
    """diffusers' pipeline of random weights of a kind of Wan's, which is saved to the folder as a causal one; `entries`
    go into the denoiser's config.json."""
    theirs = wan_pipeline(folder, kind)
    change(folder / "model_index.json", _class_name="WanCausalDMDPipeline")
    change(folder / "transformer" / "config.json", _class_name="CausalWanTransformer3DModel", **entries)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER))
    return theirs


def change(file: Path, **entries: Any) -> None:
    """Sets entries of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
