"""How many frames a clip may have: those of a latent frame come in groups after the first frame, which stands alone."""


def next_frames(num_frames: int, group: int) -> int:
    """The least possible number of frames that is no less than `num_frames`, for groups of `group` frames.

    Raises:
        ValueError: fewer than one frame.
    """
    if num_frames < 1:
        raise ValueError(f"the number of frames is {num_frames}; it must be at least 1")
    return 1 - (1 - num_frames) // group * group  # rounded up


def check_frames(num_frames: int, group: int) -> None:
    """Refuse an impossible number of frames with a ValueError that names both neighbours."""
    above = next_frames(num_frames, group)
    if above != num_frames:
        raise ValueError(
            f"the clip has {num_frames} frames; it must have 1 more than a multiple of {group}, such as"
            f" {above - group} or {above}"
        )
