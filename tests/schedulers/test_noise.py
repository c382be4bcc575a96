import pytest
import torch

from calotype.schedulers import RowNoise

SHAPE = (3, 2, 1, 4, 4)


def test_a_row_of_a_batch_is_that_row_alone() -> None:
    seeds = [5, 2**63, 7]
    batch = RowNoise(seeds, SHAPE)
    drawn = [batch.draw(), batch(0), batch(1), batch(5)]
    for b, seed in enumerate(seeds):
        alone = RowNoise([seed], (1, *SHAPE[1:]))
        for whole, row in zip(drawn, [alone.draw(), alone(0), alone(1), alone(5)], strict=True):
            assert torch.equal(whole[b], row[0])
    assert not torch.equal(drawn[0], drawn[1])


def test_bits_are_torchs_own() -> None:
    generator = torch.Generator().manual_seed(9)
    noise = RowNoise([9], (1, *SHAPE[1:]))
    for _ in range(2):
        assert torch.equal(noise.draw(), torch.randn(1, *SHAPE[1:], generator=generator))


def test_seeds_and_generators_give_the_same_and_default_dtype_does_not_matter() -> None:
    mine = [torch.Generator().manual_seed(i) for i in range(3)]
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        drawn = RowNoise(mine, SHAPE).draw()
    finally:
        torch.set_default_dtype(default)
    assert drawn.dtype == torch.float32 and drawn.shape == SHAPE
    assert torch.equal(drawn, RowNoise([0, 1, 2], SHAPE).draw())


def test_global_generator_is_untouched() -> None:
    before = torch.random.get_rng_state()
    RowNoise([0, 1, 2], SHAPE).draw()
    assert torch.equal(before, torch.random.get_rng_state())


def test_restore_goes_on_where_the_state_was_taken() -> None:
    noise = RowNoise([1, 2, 3], SHAPE)
    noise.draw(), noise(0)
    states = noise.state()
    rest = [noise(1), noise(2)]
    other = RowNoise([0, 0, 0], SHAPE)
    other.restore(states)
    assert torch.equal(other(1), rest[0]) and torch.equal(other(2), rest[1])
    noise.restore(states)
    assert torch.equal(noise(1), rest[0])
    assert all(state.dtype == torch.uint8 for state in states)


def test_a_second_run_must_bring_its_own_noise() -> None:
    noise = RowNoise([1, 2, 3], SHAPE)
    noise(0), noise(3)
    with pytest.raises(ValueError, match="step 3 asks for noise after step 3"):
        noise(3)


def test_bad_input() -> None:
    shared = torch.Generator()
    with pytest.raises(ValueError, match=r"shape \[3, 2, 1, 4, 4\] needs one seed or generator per row, got 2"):
        RowNoise([1, 2], SHAPE)
    with pytest.raises(ValueError, match="got 0"):
        RowNoise([], ())
    with pytest.raises(ValueError, match="got -1"):
        RowNoise([-1], (1, 2))
    with pytest.raises(ValueError, match="got 18446744073709551616"):
        RowNoise([2**64], (1, 2))
    with pytest.raises(ValueError, match="two rows"):
        RowNoise([shared, shared], (2, 2))
    with pytest.raises(ValueError, match="1 noise states for 3 rows"):
        RowNoise([1, 2, 3], SHAPE).restore((shared.get_state(),))


def test_generators_on_other_devices_are_refused() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a second device")
    with pytest.raises(ValueError, match="must be on the CPU"):
        RowNoise([torch.Generator("cuda")], (1, 2))
