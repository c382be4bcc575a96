"""Networks that prepare both sides of a guided run at once, reading hoisted weights once for both (FLUX.1, SD3)."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic

from ..core.attention.base import AttentionSelector
from ..core.stream import Runner, run_blocks
from ..schedulers.base import Point
from .base import Conditioning, P
from .guidance import Run
from .hoisting import HoistingModule


class PairingModule(HoistingModule, Generic[P]):
    """Implements `PairingDenoiser`, and `Denoiser.prepare`, by `prepared_for`."""

    @abstractmethod
    def prepared_for(self, conditionings: Sequence[Conditioning], run: Run) -> list[P]:
        """What is prepared for each conditioning of a run; weights are read once for all."""

    def prepare(
        self,
        conditioning: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> P:
        """Everything for latents of `shape` [B, C, 1, h, w] at these points.

        Raises:
            ValueError: latents or conditioning of a shape or kind that the model does not take.
        """
        run = Run(shape=shape, evaluations=evaluations, attention=attention, runner=runner)
        return self.prepared_for((conditioning,), run)[0]

    def prepare_both(
        self,
        first: Conditioning,
        second: Conditioning,
        shape: tuple[int, ...],
        evaluations: Sequence[Point],
        *,
        attention: AttentionSelector,
        runner: Runner = run_blocks,
    ) -> tuple[P, P]:
        """See `PairingDenoiser`."""
        run = Run(shape=shape, evaluations=evaluations, attention=attention, runner=runner)
        one, other = self.prepared_for((first, second), run)
        return one, other
