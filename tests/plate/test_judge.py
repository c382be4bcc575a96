"""The judge on true renders, on wrong pictures, and the evaluation around it."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from calotype.plate.training import captions, evaluate, finder, judge, scenes, sheet
from calotype.vae.plate import PlateVAE, PlateVAEConfig

PER_KIND = 4


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def samples():
    random = np.random.default_rng(3)
    return [captions.random_sample(kind, random) for kind in captions.KINDS for _ in range(PER_KIND)]


@pytest.fixture(scope="module")
def pictures(samples):
    return np.stack([scenes.render(sample.scene) for sample in samples])


def accepted(pictures, facts):
    return sum(verdict.right for verdict in judge.judge(np.asarray(pictures), facts))


def facts_of(samples):
    return [sample.facts for sample in samples]


def other_object(scene, random):
    sprites = list(scene.sprites)
    which = random.integers(len(sprites))
    index = (sprites[which].index + 1 + int(random.integers(118))) % 120
    sprites[which] = dataclasses.replace(sprites[which], index=index)
    return dataclasses.replace(scene, sprites=tuple(sprites))


def test_true_pictures_are_right_and_read_exactly(samples, pictures):
    verdicts = judge.judge(pictures, facts_of(samples))
    assert [v.why for v in verdicts] == [""] * len(samples)
    for sample, verdict in zip(samples, verdicts, strict=True):
        drawn = {(s.index, s.size, s.x, s.y) for s in sample.scene.sprites}
        assert {(s.index, s.size, s.x, s.y) for s in verdict.reading.sprites} == drawn
        assert verdict.reading.background == sample.scene.backdrop.name
        assert all(s.margin > 0.05 for s in verdict.reading.sprites)


def test_another_object_is_wrong(samples):
    random = np.random.default_rng(0)
    swapped = [scenes.render(other_object(sample.scene, random)) for sample in samples]
    assert accepted(swapped, facts_of(samples)) == 0


def test_a_missing_object_is_wrong(samples):
    fewer = [scenes.render(dataclasses.replace(s.scene, sprites=s.scene.sprites[1:])) for s in samples]
    verdicts = judge.judge(np.asarray(fewer), facts_of(samples))
    assert not any(verdict.right or verdict.count for verdict in verdicts)


def test_an_object_too_many_is_wrong():
    random = np.random.default_rng(1)
    two = [captions.random_sample("two of", random) for _ in range(4)]
    facts = [dataclasses.replace(s.facts, objects=s.facts.objects[:1], sizes=(None,)) for s in two]
    assert accepted([scenes.render(s.scene) for s in two], facts) == 0


def test_another_background_is_wrong(samples):
    stated = [s for s in samples if s.facts.background is not None]
    names = scenes.BACKGROUNDS
    wrong = []
    for n, sample in enumerate(stated):
        name = names[(names.index(sample.scene.backdrop.name) + 1 + n % 14) % len(names)]
        backdrop = dataclasses.replace(sample.scene.backdrop, name=name)
        wrong.append(scenes.render(dataclasses.replace(sample.scene, backdrop=backdrop)))
    verdicts = judge.judge(np.stack(wrong), facts_of(stated))
    assert not any(v.background for v in verdicts)


def test_the_reverse_order_is_wrong(samples, pictures):
    chosen = [n for n, s in enumerate(samples) if s.facts.kind in ("two", "row")]
    facts = [
        dataclasses.replace(f, objects=f.objects[::-1], sizes=f.sizes[::-1]) for f in (samples[n].facts for n in chosen)
    ]
    verdicts = judge.judge(pictures[chosen], facts)
    assert all(v.objects for v in verdicts)
    assert not any(v.place for v in verdicts)
    assert all(v.why.startswith("not ") for v in verdicts)


def test_smears_and_blends_are_wrong(samples, pictures):
    random = np.random.default_rng(2)
    others = np.stack([scenes.render(other_object(s.scene, random)) for s in samples])
    blend = ((pictures.astype(np.float32) + others) / 2).astype(np.uint8)
    assert accepted(blend, facts_of(samples)) == 0
    empty = np.stack([scenes.draw_backdrop(s.scene.backdrop) for s in samples])
    faint = (0.45 * pictures + 0.55 * empty).astype(np.uint8)
    assert accepted(faint, facts_of(samples)) <= 1


def test_a_spoilt_background_is_wrong(samples, pictures):
    noise = np.random.default_rng(0).normal(0, 40, pictures.shape)
    spoilt = np.clip(pictures + noise, 0, 255).astype(np.uint8)
    assert accepted(spoilt, facts_of(samples)) == 0


def one_sprite(**changes):
    values = {"index": 5, "size": 64, "x": 32, "y": 32, "explained": 0.95, "detail": 0.5, "margin": 0.3}
    return finder.Sighting(**(values | changes))


def reading(*sprites, **changes):
    values = {
        "background": "red",
        "horizon": 64,
        "backdrop": np.zeros((128, 128, 3), np.float32),
        "agreement": 1.0,
        "sprites": sprites,
        "remainder": 0.0,
    }
    return finder.Reading(**(values | changes))


def facts(**changes):
    values = {
        "kind": "one",
        "objects": (5,),
        "relation": "none",
        "background": "red",
        "column": None,
        "row": None,
        "sizes": (None,),
    }
    return captions.Facts(**(values | changes))


@pytest.mark.parametrize(
    ("seen", "asked", "why"),
    [
        (reading(one_sprite()), facts(), ""),
        (reading(one_sprite(), background="blue"), facts(), "background is blue"),
        (reading(one_sprite(), background="blue"), facts(background=None), ""),
        (reading(one_sprite(), agreement=0.5), facts(background=None), "background is spoilt"),
        (reading(), facts(), "other objects"),
        (reading(one_sprite(index=6)), facts(), "other objects"),
        (reading(one_sprite(explained=0.6)), facts(), "smeared"),
        (reading(one_sprite(detail=-0.5)), facts(), "smeared"),
        (reading(one_sprite(), remainder=5000.0), facts(), "something else is there"),
        (reading(one_sprite()), facts(column=0), "wrong column"),
        (reading(one_sprite()), facts(column=1, row=1), ""),
        (reading(one_sprite(x=0)), facts(column=0, row=0), "wrong row"),
        (reading(one_sprite(x=64, y=64)), facts(column=2, row=2), ""),
        (reading(one_sprite()), facts(sizes=(96,)), "size 64"),
        (reading(one_sprite()), facts(sizes=(64,)), ""),
    ],
)
def test_each_rule_for_one_object(seen, asked, why):
    verdict = judge.decide(seen, asked)
    assert verdict.why == why
    assert verdict.right == (not why)


def test_rules_for_several_objects():
    row = [one_sprite(index=i, size=32, x=48 * i, y=32) for i in range(3)]
    asked = facts(kind="row", objects=(0, 1, 2), relation="left of", sizes=(None,) * 3)
    assert judge.decide(reading(*row), asked).right
    uneven = [row[0], row[1], dataclasses.replace(row[2], y=64)]
    assert judge.decide(reading(*uneven), asked).why == "not in a row"
    above = facts(kind="two", objects=(0, 1), relation="above", sizes=(None, None))
    assert judge.decide(reading(*row[:2]), above).why == "not above"
    others = judge.decide(reading(*row[:2]), dataclasses.replace(above, objects=(7, 8)))
    assert others.count and not others.objects
    assert not judge.decide(reading(*row), above).count
    pair = facts(kind="two of", objects=(0, 0), relation="left of", sizes=(None, None))
    stacked = [one_sprite(index=0, x=32, y=0), one_sprite(index=0, x=32, y=64)]
    assert judge.decide(reading(*stacked), pair).right


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="2 pictures but 1"):
        judge.judge(np.zeros((2, 128, 128, 3), np.uint8), [facts()])
    with pytest.raises(ValueError, match="float32"):
        finder.read_pictures(np.zeros((1, 128, 128, 3), np.float32))
    with pytest.raises(ValueError, match="share must be in"):
        evaluate.held_out_cases(0)


def test_the_held_out_cases_are_what_they_say():
    cases = evaluate.held_out_cases(0.05)
    assert [c.sample.caption for c in cases] == [c.sample.caption for c in evaluate.held_out_cases(0.05)]
    assert sum(group.count for group in evaluate.GROUPS) >= 500
    assert len({c.seed for c in cases}) == len(cases)
    for case in cases:
        sizes = sorted(s.size for s in case.sample.scene.sprites)
        assert captions.has_held_out_pair(case.sample.facts.objects, case.sample.scene.backdrop.name)
        if case.group == "large + small":
            assert sizes == [32, 96]
        if case.group == "two of equal size":
            assert sizes in ([32, 32], [64, 64])


@pytest.fixture(scope="module")
def cases():
    return evaluate.held_out_cases(0.03)


def test_evaluation_of_a_perfect_generator(cases):
    truth = {c.sample.caption: scenes.render(c.sample.scene) for c in cases}
    scores = evaluate.evaluate(lambda texts, seeds: np.stack([truth[t] for t in texts]), cases, batch=5)
    assert [s.group for s in scores] == [g.name for g in evaluate.GROUPS] + ["all"]
    assert scores[-1].share == 1 and scores[-1].counted == len(cases)
    assert evaluate.table(scores).splitlines()[0].split()[5:] == ["place", "count", "size", "ground", "sharp"]
    assert scores[-1].sharpness == pytest.approx(1, abs=0.02)
    assert scores[-1].interval[1] == 1
    assert "100.0%" in evaluate.table(scores)
    assert evaluate.as_rows(scores)[-1]["right"] == len(cases)


def test_evaluation_of_an_empty_generator(cases):
    scores = evaluate.score(np.full((len(cases), 128, 128, 3), 250, np.uint8), cases)
    assert scores[-1].right == 0
    assert math.isnan(scores[-1].sharpness)
    assert evaluate.as_rows(scores)[-1]["sharpness"] is None


def test_sharpness_falls_with_blur(cases):
    from PIL import Image, ImageFilter

    sharp = np.stack([scenes.render(c.sample.scene) for c in cases])
    soft = np.stack([np.asarray(Image.fromarray(p).filter(ImageFilter.GaussianBlur(1))) for p in sharp])
    assert evaluate.score(soft, cases)[-1].sharpness < 0.6


def test_a_pipeline_is_asked_for_numpy_pictures():
    calls = []

    class Pipe:
        def __call__(self, prompt, *, num_inference_steps, guidance_scale, seed, output_type):
            calls.append((prompt, num_inference_steps, guidance_scale, seed, output_type))

            class Result:
                images = np.full((2, 128, 128, 3), 0.5, np.float32)

            return Result()

    pictures = evaluate.from_pipeline(Pipe(), num_inference_steps=4, guidance_scale=2.0)(["a", "b"], [1, 2])
    assert calls == [(["a", "b"], 4, 2.0, [1, 2], "np")]
    assert pictures.dtype == np.uint8
    assert pictures.max() == 128


def test_the_round_trip_of_an_untrained_autoencoder_is_bad():
    torch.manual_seed(0)
    config = PlateVAEConfig(encoder_blocks=(0, 0), decoder_blocks=(0, 0, 0))
    result = evaluate.evaluate_autoencoder(PlateVAE(config), evaluate.held_out_cases(0.01))
    assert result.decibels < 20
    assert result.scores[-1].right == 0


def test_wilson_interval():
    assert evaluate.wilson(0, 10) == pytest.approx((0, 0.2775), abs=1e-3)
    assert evaluate.wilson(97, 100) == pytest.approx((0.9155, 0.9897), abs=1e-3)


def test_a_contact_sheet(tmp_path, pictures, samples):
    texts = [s.caption for s in samples[:3]]
    made = sheet.contact_sheet(pictures[:3], texts, tmp_path / "sheet.png", columns=2, right=[True, False, True])
    assert (tmp_path / "sheet.png").exists()
    assert made.size[0] == 2 * 134 + 6
    pixels = np.asarray(made)
    foot = pixels[135:150].astype(int)  # below the first row of pictures
    red = foot[..., 0] - foot[..., 1] > 80
    assert red[:, 140:].any()
    assert not red[:, :134].any()
    with pytest.raises(ValueError, match="3 pictures but 2 captions"):
        sheet.contact_sheet(pictures[:3], texts[:2])
