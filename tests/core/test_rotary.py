"""The rotary embedding against complex numbers, and what it promises."""

import math

import pytest
import torch
from torch import Tensor

from calotype.core.rotary import Pairing, RotaryConfig, RotaryScaling, apply_rotary, grid_positions, rotary_table


def rotate_by_complex_numbers(
    x: Tensor, positions: Tensor, axes: tuple[int, ...], theta: float, pairing: Pairing
) -> Tensor:
    """Pair n of axis a of x [B, H, L, Dh] float64 times exp(i position theta^(-2n / width of a)), positions [L, A]."""
    half = x.shape[-1] // 2
    out = x.clone()
    pair = 0
    for axis, width in enumerate(axes):
        for n in range(width // 2):
            first, second = (2 * pair, 2 * pair + 1) if pairing == "interleaved" else (pair, pair + half)
            angle = positions[:, axis].double() * theta ** (-2 * n / width)
            turned = torch.complex(x[..., first], x[..., second]) * torch.exp(1j * angle)
            out[..., first], out[..., second] = turned.real, turned.imag
            pair += 1
    return out


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axes", [(8,), (4, 2, 6)])
def test_it_multiplies_by_complex_numbers(axes: tuple[int, ...], dtype: str, pairing: Pairing) -> None:
    config = RotaryConfig(axes=axes, theta=100.0, pairing=pairing, dtype="float64" if dtype == "float64" else "float32")
    positions = torch.randint(0, 40, (5, len(axes)))
    x = torch.randn(2, 3, 5, sum(axes))
    expected = rotate_by_complex_numbers(x.double(), positions, axes, 100.0, pairing)
    out = apply_rotary(x, rotary_table(config, positions))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5)


def test_float64_tables_are_exact_at_large_positions_and_float32_tables_are_not() -> None:
    positions = torch.tensor([[100_003]])
    exact = torch.tensor([math.cos(100_003 * 10000 ** (-2 * n / 64)) for n in range(32)], dtype=torch.float64)
    errors = [
        float((rotary_table(RotaryConfig(axes=(64,), dtype=dtype), positions).cos[0, 0].double() - exact).abs().max())
        for dtype in ("float64", "float32")
    ]
    assert errors[0] < 1e-6 < 1e-4 < errors[1]


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_scores_depend_on_distances_only(pairing: Pairing) -> None:
    config = RotaryConfig(axes=(4, 8), theta=50.0, pairing=pairing)
    q, k = torch.randn(1, 1, 1, 12), torch.randn(1, 1, 1, 12)
    scores = [
        (
            apply_rotary(q, rotary_table(config, torch.tensor([at])))
            * apply_rotary(k, rotary_table(config, torch.tensor([to])))
        ).sum()
        for at, to in (([3, 9], [1, 4]), ([13, 5], [11, 0]))
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


def test_rows_may_have_their_own_positions() -> None:
    config = RotaryConfig(axes=(8,))
    positions = torch.tensor([[[0], [1]], [[5], [9]]])
    x = torch.randn(2, 3, 2, 8)
    together = apply_rotary(x, rotary_table(config, positions))
    for b in range(2):
        assert torch.equal(together[b], apply_rotary(x[b : b + 1], rotary_table(config, positions[b]))[0])


def test_the_dtype_is_kept_and_the_rotation_is_computed_in_float32() -> None:
    rotary = rotary_table(RotaryConfig(axes=(8,)), torch.arange(5)[:, None])
    assert rotary.cos.shape == (1, 5, 4)
    assert rotary.cos.dtype == rotary.sin.dtype == torch.float32
    x = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16)
    before = x.clone()
    out = apply_rotary(x, rotary)
    assert torch.equal(out, apply_rotary(x.float(), rotary).bfloat16())
    assert torch.equal(x, before)


def turns(scaling: RotaryScaling, width: int = 16, theta: float = 100.0) -> list[float]:
    """By what each pair's frequency is divided."""
    plain = RotaryConfig(axes=(width,), theta=theta).frequencies[0]
    scaled = RotaryConfig(axes=(width,), theta=theta, scaling=scaling).frequencies[0]
    return (plain / scaled).tolist()


def test_linear_scaling_stretches_positions() -> None:
    assert turns(RotaryScaling(kind="linear", factor=4.0)) == pytest.approx([4.0] * 8)
    scaled = RotaryConfig(axes=(8,), theta=50.0, scaling=RotaryScaling(kind="linear", factor=4.0))
    plain = RotaryConfig(axes=(8,), theta=50.0)
    far, near = torch.tensor([[8], [20]]), torch.tensor([[2], [5]])
    torch.testing.assert_close(rotary_table(scaled, far).cos, rotary_table(plain, near).cos)


def test_llama3_scaling_spares_what_turns_often() -> None:
    scaling = RotaryScaling(kind="llama3", factor=8.0, original_context=64, low_frequency=1.0, high_frequency=4.0)
    divided = turns(scaling)
    for n, found in enumerate(divided):
        times = 64 * 100 ** (-2 * n / 16) / (2 * math.pi)
        smooth = min(max((times - 1) / 3, 0), 1)
        assert found == pytest.approx(1 / ((1 - smooth) / 8 + smooth), rel=1e-5)
    assert divided[0] == 1.0
    assert divided[-1] == pytest.approx(8.0)
    assert 1.01 < divided[3] < 7.9


def test_yarn_scaling_is_a_ramp_over_pairs_with_a_gain() -> None:
    scaling = RotaryScaling(kind="yarn", factor=4.0, original_context=256, beta_fast=16.0, beta_slow=1.0)
    low, high = (8 * math.log(256 / (times * 2 * math.pi)) / math.log(100) for times in (16.0, 1.0))
    low, high = math.floor(low), math.ceil(high)
    for n, found in enumerate(turns(scaling)):
        share = min(max((n - low) / (high - low), 0), 1)
        assert found == pytest.approx(1 / (share / 4 + 1 - share), rel=1e-5)
    assert scaling.gain == pytest.approx(0.1 * math.log(4) + 1)
    assert RotaryScaling(kind="yarn", factor=0.5, original_context=8).gain == 1.0
    assert RotaryScaling(kind="yarn", factor=4.0, original_context=8, attention_factor=1.5).gain == 1.5
    table = rotary_table(RotaryConfig(axes=(16,), scaling=scaling), torch.zeros(1, 1))
    torch.testing.assert_close(table.cos, torch.full((1, 1, 8), scaling.gain))


def test_yarn_with_one_edge_for_both_ends_is_finite() -> None:
    scaling = RotaryScaling(kind="yarn", factor=4.0, original_context=2, beta_fast=2.0, beta_slow=2.0, truncate=False)
    assert all(math.isfinite(found) for found in turns(scaling))


def test_divisors_are_taken_as_given() -> None:
    divisors = tuple(float(n + 1) for n in range(8))
    assert turns(RotaryScaling(kind="divisors", divisors=divisors)) == pytest.approx(divisors)
    with pytest.raises(ValueError, match="3 rotary divisors for 8 pairs"):
        turns(RotaryScaling(kind="divisors", divisors=(1.0, 2.0, 3.0)))


def test_impossible_scalings_are_refused() -> None:
    with pytest.raises(ValueError, match="factor is 0"):
        RotaryScaling(kind="linear", factor=0)
    with pytest.raises(ValueError, match="yarn rotary scaling needs the original context's length"):
        RotaryScaling(kind="yarn", factor=2.0)
    with pytest.raises(ValueError, match=r"frequencies 4\.0 and 1\.0 must ascend"):
        RotaryScaling(kind="llama3", factor=2.0, original_context=8, low_frequency=4.0, high_frequency=1.0)


def test_sections_share_the_pairs_of_one_axis_out() -> None:
    plain = RotaryConfig(axes=(12,), theta=50.0, pairing="half")
    shared = RotaryConfig(axes=(12,), theta=50.0, pairing="half", sections=(1, 2, 3))
    positions = torch.tensor([[4, 0, 9], [1, 7, 2]])
    found = rotary_table(shared, positions)
    for pair, axis in enumerate((0, 1, 1, 2, 2, 2)):
        assert torch.equal(found.cos[..., pair], rotary_table(plain, positions[:, axis, None]).cos[..., pair])
    words = torch.arange(5)[:, None]
    assert torch.equal(rotary_table(shared, words).sin, rotary_table(plain, words).sin)
    assert torch.equal(rotary_table(shared, words.expand(-1, 3)).sin, rotary_table(plain, words).sin)
    with pytest.raises(ValueError, match="positions have 2 axes"):
        rotary_table(shared, positions[:, :2])
    with pytest.raises(ValueError, match="do not make up the pairs"):
        RotaryConfig(axes=(12,), sections=(1, 2))


def test_grid_positions_are_row_major_and_may_start_anywhere() -> None:
    assert grid_positions((2, 1, 2)).tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    assert grid_positions((1, 2), start=(7, -1)).tolist() == [[7, -1], [7, 0]]
    assert grid_positions((2,)).dtype == torch.int64


def test_impossible_settings_are_refused() -> None:
    for axes in ((8, 3), (), (0, 4)):
        with pytest.raises(ValueError, match="even width"):
            RotaryConfig(axes=axes)
    with pytest.raises(ValueError, match="theta is 0"):
        RotaryConfig(axes=(4,), theta=0)
    with pytest.raises(ValueError, match="positions have 2 axes; the rotary embedding has 1"):
        rotary_table(RotaryConfig(axes=(8,)), torch.zeros(5, 2))
    rotary = rotary_table(RotaryConfig(axes=(2,)), torch.zeros(5, 1))
    with pytest.raises(ValueError, match="heads are 8 wide; the rotary tables are made for 2"):
        apply_rotary(torch.zeros(1, 1, 5, 8), rotary)
