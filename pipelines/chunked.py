"""How many frames clips have that are made chunk by chunk."""

from ..denoisers.base import Denoiser
from ..denoisers.causal import CausalDenoiser, Chunks


def chunks_of(denoiser: Denoiser[object]) -> Chunks | None:
    """How a denoiser's clips are made, None where they are made whole."""
    return denoiser.chunks if isinstance(denoiser, CausalDenoiser) else None


def chunked_frames(num_frames: int, given: int, chunks: Chunks, group: int, *, name: str) -> int:
    """The frames of so many whole chunks that there are `num_frames`, `given` ones of the argument `name` among them;
    `group` are those of a latent frame after the first.

    Raises:
        ValueError: the given ones are no whole chunks, or all that are asked for.
    """
    if given:
        above = _whole(given, chunks, group)
        near = [each for each in (above - chunks.frames * group, above) if each > 0]
        if above != given:
            counts = " or ".join(map(str, near))
            raise ValueError(
                f"{name} has {given} frames; this model goes on from whole chunks, such as {counts} frames"
            )
        if num_frames <= given:
            raise ValueError(f"num_frames is {num_frames}, with the {given} of {name}; it must be more than {given}")
    return _whole(num_frames, chunks, group)


def _whole(num_frames: int, chunks: Chunks, group: int) -> int:
    """The frames of the least number of whole chunks that have `num_frames`."""
    latent_frames = 1 - (1 - num_frames) // group  # rounded up
    return 1 + (chunks.whole(latent_frames) - 1) * group
