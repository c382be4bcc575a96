"""The bundled weights, which are far from random: batches equal single runs."""

from typing import Any

from calotype.pipelines.load import load

PROMPTS = ("a fox", "two big yellow cats and a small tree on a beach")
SEEDS = (5, 6)


def test_rows_alone():
    pipe = load()
    arguments: dict[str, Any] = {"num_inference_steps": 2, "output_type": "latent", "progress": False}
    batch = pipe(PROMPTS, seed=SEEDS, **arguments).latents
    assert float((batch[0] - batch[1]).norm() / batch[1].norm()) > 0.1
    for row, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        alone = pipe(prompt, seed=seed, **arguments).latents[0]
        assert float((batch[row] - alone).norm() / alone.norm()) <= 1e-5
