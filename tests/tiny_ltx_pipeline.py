"""Tiny random pipelines of LTX-Video, with values that are not diffusers' defaults."""

from pathlib import Path
from typing import Any

from tiny_ltx import ltx_transformer
from tiny_ltx_vae import PLAIN, TIMED, ltx_vae
from tiny_text_encoders import t5_model, t5_tokenizer

import calotype

SIZES: dict[str, Any] = {"caption_channels": 32}
VAES = {"plain": PLAIN, "timed": TIMED, "later": TIMED}


def flow_match(**changes: Any) -> Any:
    """LTX-Video's scheduler."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    shifts = {"base_shift": 0.9, "max_shift": 1.9, "base_image_seq_len": 16, "max_image_seq_len": 400}
    return FlowMatchEulerDiscreteScheduler(
        **{"use_dynamic_shifting": True, "shift_terminal": 0.12, **shifts, **changes}
    )


def ltx_pipeline(folder: Path, kind: str = "plain", *, scheduler: Any = None, **sizes: Any) -> Any:
    """diffusers' pipeline of random weights, which is also saved to the folder; 8 pixels a latent cell, 4 frames a
    group, but 16 and 8 with a decoder that is told a time; "later" is of the class that came with 0.9.5, whose
    scheduler does not shift. `sizes` are the denoiser's."""
    import diffusers

    shifts = flow_match() if kind != "later" else diffusers.FlowMatchEulerDiscreteScheduler()
    pipe: Any = (diffusers.LTXConditionPipeline if kind == "later" else diffusers.LTXPipeline)(
        tokenizer=t5_tokenizer(),
        text_encoder=t5_model(),
        vae=ltx_vae(VAES[kind]),
        scheduler=shifts if scheduler is None else scheduler,
        transformer=ltx_transformer(**{**SIZES, **sizes}),
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe


class LTXPipelines:
    """Pipelines by kind, each made once, in folders below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._both: dict[str, tuple[Any, Any]] = {}

    def folder(self, kind: str) -> Path:
        """That of a kind."""
        self.both(kind)
        return self.root / kind

    def both(self, kind: str) -> tuple[Any, Any]:
        """Ours and theirs, of a kind."""
        if kind not in self._both:
            theirs = ltx_pipeline(self.root / kind, kind)
            self._both[kind] = (calotype.load(self.root / kind), theirs)
        return self._both[kind]

    def from_picture(self, kind: str) -> tuple[Any, Any]:
        """Ours, and their pipeline of clips that begin with a picture."""
        from diffusers import LTXImageToVideoPipeline

        ours, theirs = self.both(kind)
        other = LTXImageToVideoPipeline(**theirs.components)
        other.set_progress_bar_config(disable=True)
        return ours, other
