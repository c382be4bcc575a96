"""How many frames clips have that are made chunk by chunk, and what becomes of a clip that goes on: it comes first in
the result as it is, and the model sees its end.

Legend: N clips, F frames, H W pixels.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from ..denoisers.base import Denoiser
from ..denoisers.causal import CausalDenoiser, Chunks

if TYPE_CHECKING:
    from .base import Encoded


def chunks_of(denoiser: Denoiser[object]) -> Chunks | None:
    """How a denoiser's clips are made, None where they are made whole."""
    return denoiser.chunks if isinstance(denoiser, CausalDenoiser) else None


def chunked_frames(num_frames: int, given: int, chunks: Chunks, group: int, *, name: str) -> int:
    """The frames of so many whole chunks that there are `num_frames`, `given` ones of the argument `name` among them;
    `group` are those of a latent frame after the first.

    Raises:
        ValueError: the given ones are all that are asked for.
    """
    if given and num_frames <= given:
        raise ValueError(f"num_frames is {num_frames}, with the {given} of {name}; it must be more than {given}")
    unseen = num_unseen(given, group)
    begun = latent_frames(given - unseen, group) if given else 0
    return unseen + _frames(chunks.whole(latent_frames(num_frames - unseen, group), begun), group)


def num_unseen(given: int, group: int) -> int:
    """How many frames of a clip that goes on the model does not see, the first ones: those after them are as many as
    latent frames stand for."""
    return (given - 1) % group if given else 0


def given_warnings(given: int, chunks: Chunks, group: int) -> tuple[str, ...]:
    """What to say of a clip of `given` frames that goes on."""
    if not given:
        return ()
    seen = given - num_unseen(given, group)
    found = [] if seen == given else [f"video has {given} frames, of which the model sees the last {seen}"]
    above = chunks.whole(latent_frames(seen, group))
    if above != latent_frames(seen, group):
        near = [_frames(each, group) for each in (above - chunks.frames, above) if each > 0]
        counts = " or ".join(map(str, near))
        found.append(f"video: its last {seen} frames are no whole chunks ({counts} are); the model sees a shorter one")
    return tuple(found)


def continued(groups: Iterable[Tensor], run: "Encoded") -> Iterator[Tensor]:
    """Frames [N, 3, F, H, W] that are decoded in a run; of a clip that goes on those that are given as they are, then
    of the decoded ones those that come after them."""
    given, left = run.pixels, run.plan.num_given - run.plan.num_unseen
    if given is not None and left:
        yield given
    for frames in groups:
        if frames.shape[2] > left:
            yield frames[:, :, left:] if left else frames
        left = max(left - frames.shape[2], 0)


def latent_frames(num_frames: int, group: int) -> int:
    """The least number of latent frames that stand for so many frames."""
    return 1 - (1 - num_frames) // group


def _frames(latent_frames: int, group: int) -> int:
    return 1 + (latent_frames - 1) * group
