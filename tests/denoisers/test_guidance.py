import pytest
import torch
from fakes import CHANNELS, FakeDenoiser, FakeEncoder, selector
from torch import Tensor

from calotype.denoisers.base import Conditioning, Prompt
from calotype.denoisers.guidance import ClassifierFree, Guidance, NormLimit, Run, TokenNorm, Unguided, rescaled
from calotype.schedulers import flow_schedule
from calotype.schedulers.base import Slope

POINTS = flow_schedule(5).points[:-1]
SHAPE = (2, CHANNELS, 1, 3, 4)
X = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def told(*prompts: str) -> Conditioning:
    text = FakeEncoder()(prompts)
    return Conditioning(states=text.states, lengths=text.lengths)


PROMPT = Prompt(positive=told("a red fox", "a cat"), negative=told("", "blurry and dark"))


def bound(guidance: Guidance, denoiser: FakeDenoiser | None = None, prompt: Prompt = PROMPT) -> Slope:
    run = Run(shape=SHAPE, evaluations=POINTS, attention=selector())
    return guidance.bind(denoiser or FakeDenoiser(), prompt, run)


def along(guidance: Guidance, prompt: Prompt = PROMPT) -> list[Tensor]:
    slope = bound(guidance, prompt=prompt)
    return [slope(X, point) for point in POINTS]


CONDITIONAL = along(Unguided())
assert PROMPT.negative is not None
UNCONDITIONAL = along(Unguided(), Prompt(positive=PROMPT.negative))


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("scale", [-1.0, 0.5, 3.0])
def test_formula(batched: bool, scale: float):
    for d, c, u in zip(along(ClassifierFree(scale, batched=batched)), CONDITIONAL, UNCONDITIONAL, strict=True):
        torch.testing.assert_close(d, u + scale * (c - u), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rescale", [0.0, 0.7])
def test_batched_equals_two_passes(rescale: float):
    batched = along(ClassifierFree(4.0, rescale=rescale))
    for a, b in zip(batched, along(ClassifierFree(4.0, batched=False, rescale=rescale)), strict=True):
        assert (a - b).norm() / b.norm() <= 1e-5


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("rescale", [0.0, 0.5])
def test_scale_1_is_the_conditional_pass(batched: bool, rescale: float):
    guidance = ClassifierFree(1.0, batched=batched, rescale=rescale)
    assert not guidance.needs_negative
    assert same(along(guidance, Prompt(positive=PROMPT.positive)), CONDITIONAL)


@pytest.mark.parametrize("batched", [True, False])
def test_scale_0_is_the_unconditional_pass(batched: bool):
    assert same(along(ClassifierFree(0.0, batched=batched)), UNCONDITIONAL)


@pytest.mark.parametrize("interval", [(0.5, 0.5), (0.8, 0.2)])
def test_an_empty_interval_is_the_conditional_pass(interval: tuple[float, float]):
    guidance = ClassifierFree(5.0, interval=interval)
    assert not guidance.needs_negative
    assert same(along(guidance, Prompt(positive=PROMPT.positive)), CONDITIONAL)


def test_an_interval_without_a_point_is_the_conditional_pass():
    assert same(along(ClassifierFree(5.0, interval=(0.65, 0.75))), CONDITIONAL)


@pytest.mark.parametrize("batched", [True, False])
def test_interval(batched: bool):
    inside = along(ClassifierFree(5.0, batched=batched))
    some = along(ClassifierFree(5.0, batched=batched, interval=(0.3, 0.8)))  # points at 1.0, 0.8, 0.6, 0.4, 0.2
    assert same(some[1:4], inside[1:4])
    assert same([some[0], some[4]], [CONDITIONAL[0], CONDITIONAL[4]])


@pytest.mark.parametrize(
    ("guidance", "rows"),
    [
        (Unguided(), [2]),
        (ClassifierFree(1.0), [2]),
        (ClassifierFree(0.0), [2]),
        (ClassifierFree(3.0), [4]),
        (ClassifierFree(3.0, batched=False), [2, 2]),
        (ClassifierFree(3.0, interval=(0.0, 0.1)), [2]),
    ],
)
def test_forwards_made(guidance: Guidance, rows: list[int]):
    denoiser = FakeDenoiser()
    bound(guidance, denoiser)(X, POINTS[0])
    assert denoiser.rows == rows


def test_rescale_is_the_formula_of_lin_et_al():
    guidance = ClassifierFree(6.0, rescale=0.7)
    for d, c, plain in zip(along(guidance), CONDITIONAL, along(ClassifierFree(6.0)), strict=True):
        for b in range(SHAPE[0]):
            full = plain[b] * (c[b].std() / plain[b].std())
            torch.testing.assert_close(d[b], 0.7 * full + 0.3 * plain[b])


def test_rescale_of_a_zero_slope_is_finite():
    assert not rescaled(torch.zeros(SHAPE), X, 1.0).any()


@pytest.mark.parametrize("batched", [True, False])
def test_renormalised_tokens_are_as_long_as_those_of_the_prompt(batched: bool):
    """Of 1 x 1 cells here: each has the direction of the plain formula, and c's length over the channels."""
    guidance = ClassifierFree(6.0, batched=batched, renormalise=TokenNorm(1))
    for d, c, plain in zip(along(guidance), CONDITIONAL, along(ClassifierFree(6.0)), strict=True):
        torch.testing.assert_close(d.norm(dim=1), c.norm(dim=1))
        torch.testing.assert_close(d / d.norm(dim=1, keepdim=True), plain / plain.norm(dim=1, keepdim=True))


def test_renormalised_tokens_of_several_cells():
    guided, c = torch.randn(2, 2, 3, 1, 4, 6, generator=torch.Generator().manual_seed(1))
    guided[0, :, :, :2, 2:4] = 0
    found = TokenNorm(2)(guided, c)
    assert found.isfinite().all() and not found[0, :, :, :2, 2:4].any()
    one = (1, slice(None), 0, slice(2, 4), slice(4, 6))
    torch.testing.assert_close(found[one], guided[one] * c[one].norm() / guided[one].norm())


def test_a_norm_limit_makes_only_what_is_longer_shorter():
    """Row by row, over all cells: the second is short enough already, and the third is nothing."""
    c, guided = torch.ones(3, 2, 1, 2, 2), torch.ones(3, 2, 1, 2, 2) * torch.tensor([3.0, 1.4, 0.0]).view(3, 1, 1, 1, 1)
    found = NormLimit(1.5)(guided, c)
    torch.testing.assert_close(found[0], 0.5 * guided[0])
    assert torch.equal(found[1:], guided[1:])
    with pytest.raises(ValueError, match="factor is 0; it must be a finite number over 0"):
        NormLimit(0)


def test_scale_0_is_renormalised_too():
    """Only the length of c is left."""
    (d, *_) = along(ClassifierFree(0.0, renormalise=TokenNorm(1)))
    torch.testing.assert_close(d.norm(dim=1), CONDITIONAL[0].norm(dim=1))


def test_a_missing_negative_is_an_error():
    with pytest.raises(ValueError, match=r"scale 2\.0 needs a negative"):
        bound(ClassifierFree(2.0), prompt=Prompt(positive=PROMPT.positive))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": float("nan")}, "nan"),
        ({"scale": 2.0, "rescale": 1.5}, "1.5; it must be from 0 to 1"),
        ({"scale": 2.0, "interval": (0.0, 2.0)}, r"\(0\.0, 2\.0\)"),
    ],
)
def test_values_out_of_range(options: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        ClassifierFree(**options)  # type: ignore[arg-type]
