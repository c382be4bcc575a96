"""Noise drawn row by row, so that a picture's noise depends on its own seed and on nothing else."""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor


class RowNoise:
    """Standard normal float32 noise of `shape` [B, C, F, H, W], row b from source b only.

    So a row of a batch has the bits of a run alone. A source is a seed or a CPU generator; a given generator is drawn
    from, and so advances (pass its `clone_state()` to keep it as it is). Draws come in the order in which they are
    asked for: `draw()` for what precedes the sampler, then the sampler's own.

    Raises:
        ValueError: not one source per row, a seed outside 0..2**64 - 1, a generator that is not on the CPU or that
            serves two rows.
    """

    def __init__(self, sources: Sequence[int | Generator], shape: Sequence[int]) -> None:
        """Noise of `shape` from one seed or generator per row."""
        if not shape or len(sources) != shape[0]:
            raise ValueError(f"noise of shape {list(shape)} needs one seed or generator per row, got {len(sources)}")
        self._generators = [_generator(source) for source in sources]
        if len({id(generator) for generator in self._generators}) < len(sources):
            raise ValueError("one generator is given for two rows: each row needs its own")
        self._row_shape = tuple(shape[1:])
        self._next = 0

    @classmethod
    def resumed(cls, states: tuple[Tensor, ...], shape: Sequence[int]) -> "RowNoise":
        """Noise of `shape` that goes on from one generator state per row."""
        noise = cls((0,) * len(states), shape)
        noise.restore(states)
        return noise

    def draw(self) -> Tensor:
        """The next draw of every row, [B, C, F, H, W] on the CPU."""
        return self._drawn(self._row_shape)

    def draw_frames(self, count: int) -> Tensor:
        """The same for `count` frames, [B, C, count, H, W]."""
        channels, _, *sides = self._row_shape
        return self._drawn((channels, count, *sides))

    def __call__(self, i: int) -> Tensor:
        """The draw of step `i`, [B, C, F, H, W] on the CPU.

        Raises:
            ValueError: step `i` or a later one has drawn already.
        """
        if i < self._next:
            raise ValueError(
                f"step {i} asks for noise after step {self._next - 1} has drawn: start each run with its own noise"
            )
        self._next = i + 1
        return self.draw()

    def _drawn(self, shape: tuple[int, ...]) -> Tensor:
        return torch.stack([torch.randn(shape, generator=each, dtype=torch.float32) for each in self._generators])

    def state(self) -> tuple[Tensor, ...]:
        """Each row's generator state, uint8."""
        return tuple(generator.get_state() for generator in self._generators)

    def restore(self, states: tuple[Tensor, ...]) -> None:
        """Go on as after `state()` returned `states`.

        Raises:
            ValueError: not one state per row, or not the state of a generator.
        """
        if len(states) != len(self._generators):
            raise ValueError(f"{len(states)} noise states for {len(self._generators)} rows")
        for generator, state in zip(self._generators, states, strict=True):
            if state.dtype is not torch.uint8 or state.shape != generator.get_state().shape:
                raise ValueError(f"a noise state is {list(state.shape)} of {state.dtype}: no generator's")
            generator.set_state(state.cpu())
        self._next = 0


def _generator(source: int | Generator) -> Generator:
    if isinstance(source, Generator):
        if source.device.type != "cpu":
            raise ValueError(
                f"generators must be on the CPU (the same noise on every device), got one on {source.device}"
            )
        return source
    if not 0 <= source < 2**64:
        raise ValueError(f"seeds lie in 0..2**64 - 1, got {source}")
    return Generator().manual_seed(source)
