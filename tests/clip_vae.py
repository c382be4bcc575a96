"""What the tests of clips' autoencoders share: clips, and checks that each of them passes. All tiny ones have 4 latent
channels.

Legend: f latent frames, h w latent cells.
"""

import threading

import pytest
import torch
from parity import error
from peak_memory import Alive
from safetensors.torch import load_file

from calotype.core.copies import moved
from calotype.vae.base import ContinuingAutoencoder, VideoAutoencoder
from calotype.vae.tiling import Tiling, tiled


def drawn(*shape, seed=0):
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def clip(ours, frames, cells, rows=1, seed=0):
    """Pixels of clips of so many latent cells a side."""
    sides = (cells[0] * ours.downsampling, cells[1] * ours.downsampling)
    return drawn(rows, 3, frames, *sides, seed=seed).clamp(-1, 1)


def check_groups_come_as_they_are_ready(ours, last_layer):
    """The last layer of the decoder is called once for each group that comes; all groups are the clip."""
    assert isinstance(ours, VideoAutoencoder) and isinstance(ours, ContinuingAutoencoder)
    latents, calls, groups = drawn(2, 4, 4, 3, 2), [], []
    hook = last_layer.register_forward_hook(lambda *_: calls.append(1))
    for group in ours.stream_decode(latents):
        groups.append(group)
        assert len(calls) == len(groups)
    hook.remove()
    assert [group.shape[2] for group in groups] == [1] + 3 * [ours.temporal_downsampling]
    whole = ours.decode(latents)
    assert torch.equal(torch.cat(groups, dim=2), whole)
    stretched = list(ours.stream_stretches(iter(latents.split(2, dim=2))))
    assert torch.equal(torch.cat(stretched, dim=2), whole)


def check_later_frames_change_nothing_before_them(ours):
    """Both halves are causal."""
    latents = drawn(1, 4, 3, 3, 2)
    assert torch.equal(next(ours.stream_decode(latents)), ours.decode(latents[:, :, :1]))
    pixels = clip(ours, 9, (3, 2))
    assert torch.equal(ours.encode(pixels)[:, :, :2], ours.encode(pixels[:, :, : 1 + ours.temporal_downsampling]))


def check_calls_share_nothing(ours, lengths, cells):
    """Two streams taken in turn, an abandoned one, and threads: each is as if it were alone. The second clip is the
    longer one."""
    latents = [drawn(1, 4, frames, *cells, seed=frames) for frames in lengths]
    expected = [ours.decode(each) for each in latents]
    next(ours.stream_decode(latents[1]))
    first, second = (ours.stream_decode(each) for each in latents)
    groups = [(group, next(second)) for group in first]
    assert torch.equal(torch.cat([a for a, _ in groups], dim=2), expected[0])
    assert torch.equal(torch.cat([*(b for _, b in groups), *second], dim=2), expected[1])
    found = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: ours.decode(latents[i])})) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], expected[i]) for i in (0, 1))


def check_options_keep_the_result_close(load, folder, latents, tiling, most):
    """Rows one by one are the same; tiles, each a clip of its own that is blended with the others, see less, which
    changes the result by at `most` that."""
    ours, in_tiles = load(folder), load(folder, tiling=tiling, slicing=True)
    whole, tiles = ours.decode(latents), in_tiles.decode(latents)
    assert error(load(folder, slicing=True).decode(latents), whole) < 2e-6
    assert 1e-6 < error(tiles, whole) < most
    assert error(tiles, tiled(ours.decode, latents, tiling, unit_in=1, unit_out=ours.downsampling)) < 3e-6
    assert torch.equal(torch.cat(list(in_tiles.stream_decode(latents)), dim=2), tiles)
    few, half = latents[:, :, :1, :3, :3], moved(ours, torch.device("cpu"), torch.bfloat16)
    assert error(half.decode(few), ours.decode(few)) < 0.1


def check_what_is_no_clip_is_refused(ours):
    """Sides, frames, channels, kinds of numbers, noise."""
    unit, group = ours.downsampling, ours.temporal_downsampling
    with pytest.raises(ValueError, match=f"the width is {unit + 1} pixels; it must be a multiple of {unit}, such as"):
        ours.encode(drawn(1, 3, 1, unit, unit + 1))
    with pytest.raises(ValueError, match=rf"has {group} frames; .* of {group}, such as 1 or {group + 1}"):
        ours.encode(drawn(1, 3, group, unit, unit))
    with pytest.raises(ValueError, match=r"shape \[1, 5, 1, 2, 2\]; it must be \[rows, 4, frames"):
        ours.stream_decode(drawn(1, 5, 1, 2, 2))
    with pytest.raises(ValueError, match=r"latents are torch\.int64"):
        ours.decode(torch.ones(1, 4, 1, 2, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="noise has shape"):
        ours.encode(drawn(1, 3, 1, unit, unit), drawn(1, 4, 2, 1, 1))


def streaming_peak(ours, latents):
    """The most bytes alive at once while latents are decoded group by group, beside these."""
    with Alive() as alive:
        for _ in ours.stream_decode(latents):
            pass
    return alive.peak - latents.nbytes


def check_its_folder_is_that_of_diffusers(load, folder, parse):
    """What is saved is what was loaded; `parse` makes a config of entries."""
    ours, weights = load(folder), load_file(folder / "diffusion_pytorch_model.safetensors")
    component = ours.component()
    assert parse(component.entries) == ours.config
    assert set(component.weights) == set(weights)
    assert all(torch.equal(component.weights[name].read(), each) for name, each in weights.items())
    with pytest.raises(ValueError, match="its tiling is"):
        load(folder, tiling=Tiling()).component()


def check_same_weights(ours, other):
    """Two autoencoders hold the same."""
    weights = other.module.state_dict()
    for name, each in ours.module.state_dict().items():
        assert torch.equal(weights[name], each)
