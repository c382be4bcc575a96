"""Wan chunk by chunk, with keys and values kept of what came before, against one masked pass of diffusers' network."""

import pytest
import tiny_wan
import torch
from causal_reference import one_pass, padded
from parity import error
from peak_memory import Alive

from calotype.core.attention.registry import attention_selector
from calotype.core.loading import build_on_meta, load_weights
from calotype.denoisers.base import Conditioning
from calotype.denoisers.causal import CausalDenoiser, Chunks
from calotype.denoisers.causal_wan import CausalWan
from calotype.denoisers.wan import WanDenoiser
from calotype.denoisers.wan_config import WanConfig
from calotype.denoisers.wan_keys import wan_key_map
from calotype.schedulers import flow_schedule

SIZE = (4, 6)
AREA = 6
WIDTH, LAYERS, BYTES = 42, 2, 4
POINTS = flow_schedule(4, 5.0).points[:-1]
KINDS = {
    "all": Chunks(frames=2),
    "first alone": Chunks(frames=2, independent_first_frame=True),
    "window": Chunks(frames=2, window=4),
    "smallest window": Chunks(frames=2, window=2),
    "sink": Chunks(frames=2, window=5, sink=1),
    "sink of two chunks": Chunks(frames=1, window=4, sink=2),
    "sink after one": Chunks(frames=2, independent_first_frame=True, window=6, sink=2),
}


@pytest.fixture(scope="module")
def theirs():
    return tiny_wan.wan_transformer()


@pytest.fixture(scope="module")
def network(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan")
    theirs.save_pretrained(folder)
    ours = build_on_meta(lambda: WanDenoiser(WanConfig.from_entries(dict(theirs.config))))
    load_weights(ours, folder / "diffusion_pytorch_model.safetensors", wan_key_map())
    return ours.requires_grad_(False).eval()


def conditioning(*lengths, seed=0):
    """Rows of these lengths, with rubbish after their ends."""
    states = torch.randn(len(lengths), max(lengths), 20, generator=torch.Generator().manual_seed(seed))
    return Conditioning(states=states, lengths=torch.tensor(lengths))


def latents(rows, frames, seed=1):
    return torch.randn(rows, 4, frames, *SIZE, generator=torch.Generator().manual_seed(seed))


def prepared(model, told, frames):
    shape = (told.num_rows, 4, frames, *SIZE)
    return model.prepare(told, shape, POINTS, attention=attention_selector())


def slopes(model, told, clean, noisy, point=POINTS[1]):
    """That of each chunk of `noisy`, after those of `clean` before it."""
    run, found = prepared(model, told, clean.shape[2]), []
    lengths = model.chunks.lengths(clean.shape[2])
    for finished, x in zip(clean.split(lengths, dim=2), noisy.split(lengths, dim=2), strict=True):
        found.append(model.slope(x, run, point))
        model.remember(finished, run)
    return torch.cat(found, dim=2)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_slopes_are_those_of_one_masked_pass(network, theirs, kind):
    chunks = KINDS[kind]
    model, told = CausalWan(network=network, chunks=chunks), conditioning(3, 9)
    assert isinstance(model, CausalDenoiser) and not isinstance(network, CausalDenoiser)
    frames = chunks.whole(6)
    clean, noisy, lengths = latents(2, frames), latents(2, frames, seed=5), chunks.lengths(frames)
    found, point = slopes(model, told, clean, noisy), POINTS[1]
    start = 0
    for number, length in enumerate(lengths):
        stop = start + length
        clip = torch.cat((clean[:, :, :start], noisy[:, :, start:stop]), dim=2)
        times = (*(0.0,) * number, point.time)
        wanted = one_pass(theirs, padded(told), clip, times, lengths[: number + 1], chunks)[:, :, start:]
        assert error(found[:, :, start:stop], wanted) < 1e-5
        start = stop


@torch.no_grad()
def test_a_window_as_long_as_the_clip_changes_nothing(network):
    told, clean, noisy = conditioning(4), latents(1, 6), latents(1, 6, seed=2)
    for frames, alone, count in ((2, False, 6), (2, True, 5)):
        expected, *found = (
            slopes(
                CausalWan(network=network, chunks=Chunks(frames=frames, independent_first_frame=alone, **window)),
                told,
                clean[:, :, :count],
                noisy[:, :, :count],
            )
            for window in ({}, {"window": 6}, {"window": 9}, {"window": 6, "sink": 1}, {"window": 7, "sink": 4})
        )
        assert all(torch.equal(each, expected) for each in found)


@torch.no_grad()
def test_text_is_read_once_for_all_chunks(network, monkeypatch):
    asked, projected = [], WanDenoiser.projected

    def counted(self, name, h):
        asked.append(name)
        return projected(self, name, h)

    monkeypatch.setattr(WanDenoiser, "projected", counted)
    slopes(CausalWan(network=network, chunks=Chunks(frames=2)), conditioning(4), latents(1, 6), latents(1, 6))
    assert sorted(asked) == ["text_keys_values.0", "text_keys_values.1", "time_projection"]


@torch.no_grad()
def test_an_evaluation_leaves_nothing(network):
    """Until a chunk is remembered, its evaluations may be made again, in any order; runs share nothing."""
    model, told, clean = (
        CausalWan(network=network, chunks=Chunks(frames=2, window=4)),
        conditioning(4, 2),
        latents(2, 4),
    )
    run, other = (prepared(model, told, 4) for _ in range(2))
    for each in clean.split(2, dim=2):
        first = [model.slope(each, run, point) for point in POINTS]
        model.slope(latents(2, 2, seed=8), run, POINTS[0])
        again = [model.slope(each, run, point) for point in reversed(POINTS)]
        assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))
        model.slope(clean[:, :, :2], other, POINTS[0])
        model.remember(each, run)


@pytest.mark.parametrize("sink", [0, 1])
@torch.no_grad()
def test_memory_is_flat_over_40_chunks(network, sink):
    chunks = Chunks(frames=2, window=6, sink=sink)
    model, told, x = CausalWan(network=network, chunks=chunks), conditioning(4), latents(1, 2)
    peaks = []
    for count in (8, 40):
        with Alive() as alive:
            run = prepared(model, told, 2 * count)
            for _ in range(count):
                model.slope(x, run, POINTS[0])
                model.remember(x, run)
                held = run.memory.bytes
        assert held == 2 * LAYERS * WIDTH * BYTES * AREA * 6
        peaks.append(alive.peak)
        del run
    assert peaks[1] <= 1.01 * peaks[0]


@torch.no_grad()
def test_a_row_is_that_row_alone(network):
    model, told = CausalWan(network=network, chunks=Chunks(frames=2, window=4)), conditioning(5, 2, 9)
    clean, noisy = latents(3, 6), latents(3, 6, seed=3)
    together = slopes(model, told, clean, noisy)
    for row in range(3):
        alone = slopes(model, told.rows([row]), clean[row : row + 1], noisy[row : row + 1])
        assert error(alone, together[row : row + 1]) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frames": 0}, "frames is 0; it must be at least 1"),
        ({"frames": 1.5}, "frames is 1.5; it must be a whole number"),
        ({"window": 2}, "window is 2 latent frames; it must be at least 3, for a chunk of 3 and a sink of 0"),
        ({"window": 4, "sink": 2}, "window is 4 latent frames; it must be at least 5"),
        ({"sink": 2}, "sink is 2, but there is no window"),
        ({"window": 6, "sink": -1}, "sink is -1; it must be a whole number from 0"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        Chunks(**arguments)


def test_chunks_of_a_clip():
    assert Chunks().lengths(21) == (3,) * 7
    assert Chunks(independent_first_frame=True).lengths(7) == (1, 3, 3)
    assert [Chunks().whole(least) for least in (1, 3, 4, 6, 7)] == [3, 3, 6, 6, 9]
    assert [Chunks(independent_first_frame=True).whole(least) for least in (1, 2, 4, 5)] == [1, 4, 4, 7]
    for count, near in ((4, "3 or 6"), (1, "3")):
        with pytest.raises(ValueError, match=f"{count} latent frames are no whole chunks of 3; {near} are"):
            Chunks().lengths(count)
    with pytest.raises(ValueError, match="9 latent frames are no whole chunks of 3 after the first 4; 7 or 10 are"):
        Chunks().lengths(9, 4)


def test_chunks_of_a_clip_that_goes_on():
    alone = Chunks(independent_first_frame=True)
    assert [Chunks().begun(count) for count in (0, 1, 3, 5, 6)] == [(), (1,), (3,), (2, 3), (3, 3)]
    assert [alone.begun(count) for count in (0, 1, 3, 4, 6)] == [(), (1,), (1, 2), (1, 3), (1, 2, 3)]
    for chunks in (Chunks(), alone):
        for given in range(1, 9):
            assert sum(chunks.begun(given)) == given
            assert chunks.whole(given, given) == given
            assert chunks.whole(given + 1, given) == chunks.whole(given + 3, given) == given + 3
            assert chunks.lengths(given + 6, given) == (*chunks.begun(given), 3, 3)


@pytest.mark.parametrize(
    "chunks", [Chunks(), Chunks(frames=2, independent_first_frame=True), Chunks(frames=4, window=9, sink=2)]
)
def test_chunks_in_a_config(chunks):
    assert Chunks.from_entries(chunks.entries()) == chunks
    assert Chunks.from_entries({}) == Chunks.from_entries({"local_attn_size": -1, "sink_size": 3}) == Chunks()
    with pytest.raises(ValueError, match="num_frames_per_block is 0"):
        Chunks.from_entries({"num_frames_per_block": 0})


def test_a_network_that_reads_pictures_is_refused():
    config = WanConfig(beside_channels=20, layers=1, heads=1, hidden=8)
    with pytest.raises(ValueError, match="reads pictures beside its latents"):
        CausalWan(network=build_on_meta(lambda: WanDenoiser(config)))
