"""The denoiser of plate, tiny and with random weights."""

import pytest
import torch
from torch import Tensor

from calotype.core.attention.registry import attention_selector
from calotype.denoisers.base import Conditioning
from calotype.denoisers.patches import patchify, unpatchify
from calotype.denoisers.plate import PlateDenoiser, PlateDenoiserConfig
from calotype.schedulers import flow_schedule

CONFIG = PlateDenoiserConfig(
    width=16,
    heads=2,
    layers=2,
    text_layers=1,
    text_width=12,
    hidden=24,
    time_width=8,
    rotary_axes=(4, 2, 2),
    places=4,
    frames=3,
)
SHAPE = (1, 8, 1, 4, 6)
POINTS = flow_schedule(3).points[:-1]


@pytest.fixture
def denoiser() -> PlateDenoiser:
    torch.manual_seed(0)
    model = PlateDenoiser(CONFIG).requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def text(length: int = 3, rows: int = 1, width: int = 12) -> Conditioning:
    states = torch.randn(rows, length, width, generator=torch.Generator().manual_seed(1))
    return Conditioning(states=states, lengths=torch.full((rows,), length))


def slope(model: PlateDenoiser, x: Tensor, conditioning: Conditioning, place: int = 1) -> Tensor:
    prepared = model.prepare(conditioning, tuple(x.shape), POINTS, attention=attention_selector("sdpa"))
    return model.slope(x, prepared, POINTS[place])


def latents(shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def test_patches_are_channel_major_and_come_back() -> None:
    x = torch.arange(2 * 3 * 2 * 4 * 6).view(2, 3, 2, 4, 6)
    tokens = patchify(x, 2)
    assert tokens.shape == (2, 12, 12)
    assert torch.equal(tokens[1, 4].view(3, 2, 2), x[1, :, 0, 2:4, 2:4])
    assert torch.equal(unpatchify(tokens, x.shape, 2), x)


def test_the_slope_depends_on_latents_text_time_and_place(denoiser: PlateDenoiser) -> None:
    x, told = latents(), text()
    found = slope(denoiser, x, told)
    assert found.shape == SHAPE and found.dtype is torch.float32
    others = (
        slope(denoiser, x + 0.1, told),
        slope(denoiser, x, Conditioning(states=-told.states, lengths=told.lengths)),
        slope(denoiser, x, told, place=2),
        slope(denoiser, x.flip(4), told).flip(4),
    )
    assert all((other - found).norm() > 1e-2 * found.norm() for other in others)


def test_what_is_prepared_for_many_points_is_that_of_each_alone(denoiser: PlateDenoiser) -> None:
    x, told = latents(), text()
    for place, point in enumerate(POINTS):
        alone = denoiser.prepare(told, SHAPE, [point], attention=attention_selector("sdpa"))
        torch.testing.assert_close(denoiser.slope(x, alone, point), slope(denoiser, x, told, place))


def test_padding_is_not_read(denoiser: PlateDenoiser) -> None:
    x, told = latents(), text()
    padded = Conditioning(states=torch.cat((told.states, torch.full((1, 2, 12), 9.0)), dim=1), lengths=told.lengths)
    torch.testing.assert_close(slope(denoiser, x, padded), slope(denoiser, x, told), rtol=1e-5, atol=1e-6)


def test_time_stays_float32_up_to_its_embedding(denoiser: PlateDenoiser) -> None:
    low = denoiser.to(torch.bfloat16)
    near, far = (low.modulations(torch.tensor([time]))[1].scale for time in (0.9375, 0.936))
    assert not torch.equal(near, far)  # bfloat16 has one number for both
    assert torch.tensor(0.9375).bfloat16() == torch.tensor(0.936).bfloat16()


def test_frames_are_tokens_of_the_same_model(denoiser: PlateDenoiser) -> None:
    clip = latents((1, 8, 3, 4, 4))
    found = slope(denoiser, clip, text())
    assert found.shape == clip.shape
    assert denoiser.frame is not None
    denoiser.frame[0] += 1  # every frame hears of it
    assert (slope(denoiser, clip, text()) != found).flatten(3).any(-1).all()


def test_a_picture_has_no_embedding_of_a_frame(denoiser: PlateDenoiser) -> None:
    found = slope(denoiser, latents(), text())
    assert denoiser.frame is not None
    denoiser.frame += 1
    assert torch.equal(slope(denoiser, latents(), text()), found)


@pytest.mark.parametrize(
    ("shape", "told", "message"),
    [
        (SHAPE, text(width=7), "text states are 7 wide; this model reads states of width 12"),
        (SHAPE, text(rows=2), "text states have 2 rows for 1 rows of latents"),
        ((1, 4, 1, 4, 4), text(), r"latents are \(1, 4, 1, 4, 4\); this model takes 8 channels, sides in steps of 2"),
        ((1, 8, 1, 4, 5), text(), "sides in steps of 2"),
        ((1, 8, 1, 4, 12), text(), "2 x 6 picture tokens; this model has places for 4 a side"),
        ((1, 8, 4, 4, 4), text(), "4 latent frames; this model makes up to 3"),
    ],
)
def test_misfits(denoiser: PlateDenoiser, shape: tuple[int, ...], told: Conditioning, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        denoiser.prepare(told, shape, POINTS, attention=attention_selector("sdpa"))
