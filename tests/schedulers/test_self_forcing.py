"""The schedule of Self-Forcing, as FastVideo's files say it."""

import pytest

from calotype.schedulers import flow_schedule
from calotype.schedulers.self_forcing import SelfForcingConfig

FILE = {"_class_name": "SelfForcingFlowMatchScheduler", "_diffusers_version": "0.33.0.dev0"}


def test_the_files_options():
    table = {"num_inference_steps": 1000, "sigma_min": 0.0, "extra_one_step": True, "training": True}
    assert SelfForcingConfig.from_entries({**FILE, "shift": 3.5, **table}).shift == 3.5
    assert SelfForcingConfig.from_entries(FILE) == SelfForcingConfig() == SelfForcingConfig(shift=5.0)
    config = SelfForcingConfig(shift=2.5)
    assert SelfForcingConfig.from_entries(config.entries()) == config


def test_steps_are_warped_by_the_table():
    """`timesteps[1000 - t]` of a shifted table of 1000 whole timesteps from 1000 down to 1."""
    shares = [(1000 - i) / 1000 for i in range(1000)]
    table = [1000 * 5 * share / (1 + 4 * share) for share in shares]
    found = [1000 * point.time for point in flow_schedule(4, SelfForcingConfig().shift).points]
    assert found == pytest.approx([*(table[1000 - t] for t in (1000, 750, 500, 250)), 0.0])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"_class_name": "UniPCMultistepScheduler"}, "names 'UniPCMultistepScheduler': supported is SelfForcing"),
        ({"extra_one_step": False}, "extra_one_step = False is not supported: only True"),
        ({"sigma_min": 0.003}, "sigma_min = 0.003 is not supported: only 0.0"),
        ({"shift": "5"}, "shift must be a number, got '5'"),
        ({"shift": -1}, "shift must be positive, got -1"),
    ],
)
def test_mistakes(entries, message):
    with pytest.raises(ValueError, match=message):
        SelfForcingConfig.from_entries({**FILE, **entries})
