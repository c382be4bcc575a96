"""Scenes and captions: the grid, the words, what is held out."""

from itertools import pairwise

import numpy as np
import pytest

from calotype.plate.training import captions, objects, scenes

SAMPLES = 150


@pytest.fixture(scope="module")
def samples():
    random = np.random.default_rng(11)
    return [captions.random_sample(kind, random) for kind in captions.KINDS for _ in range(SAMPLES)]


def test_there_are_120_objects_with_unlike_names():
    names = objects.object_names()
    assert len(names) == 120
    words = [word for o in names for word in (o.name, *o.synonyms)]
    assert len({o.name for o in names}) == 120
    assert all(word == word.lower() for word in words)


@pytest.mark.parametrize(
    ("noun", "plural"), [("fox", "foxes"), ("cherry", "cherries"), ("boy", "boys"), ("cat", "cats"), ("fish", "fishes")]
)
def test_regular_plurals(noun, plural):
    assert objects.plural_of(noun) == plural


@pytest.mark.parametrize(
    ("noun", "words"), [("apple", "an apple"), ("fox", "a fox"), ("unicorn", "a unicorn"), ("grapes", "grapes")]
)
def test_articles(noun, words):
    assert objects.with_article(noun) == words


def test_sprites_lie_on_the_grid_and_do_not_overlap(samples):
    for sample in samples:
        covered = np.zeros((128, 128), int)
        for sprite in sample.scene.sprites:
            assert sprite.x % scenes.GRID == sprite.y % scenes.GRID == 0
            assert 0 <= sprite.x <= 128 - sprite.size
            assert 0 <= sprite.y <= 128 - sprite.size
            covered[sprite.y : sprite.y + sprite.size, sprite.x : sprite.x + sprite.size] += 1
        assert covered.max() == 1, sample.caption


def test_facts_agree_with_the_scene(samples):
    for sample in samples:
        facts, sprites = sample.facts, sample.scene.sprites
        assert facts.objects == tuple(s.index for s in sprites)
        assert facts.background in (None, sample.scene.backdrop.name)
        assert all(stated in (None, s.size) for stated, s in zip(facts.sizes, sprites, strict=True))
        centres = [(s.x + s.size / 2, s.y + s.size / 2) for s in sprites]
        if facts.relation != "none":
            axis = 0 if facts.relation == "left of" else 1
            assert all(b[axis] - a[axis] >= 16 for a, b in pairwise(centres))
        for stated, centre in ((facts.column, centres[0][0]), (facts.row, centres[0][1])):
            if stated is not None:
                assert (centre <= 48, 48 <= centre <= 80, centre >= 80)[stated], sample.caption


def test_captions_name_what_is_there(samples):
    names = objects.object_names()
    for sample in samples:
        assert sample.caption == sample.caption.lower()
        assert "{" not in sample.caption
        assert "  " not in sample.caption
        assert " a orange" not in sample.caption
        for index in sample.facts.objects:
            entry = names[index]
            assert any(word in sample.caption for word in (entry.name, entry.plural, *entry.synonyms)), sample.caption
        counts = {"two of": "two ", "three of": "three "}
        if sample.facts.kind in counts:
            assert counts[sample.facts.kind] in sample.caption
        if sample.facts.background in scenes.PLAIN_COLOURS:
            words = {"gray": ("gray", "grey"), "purple": ("purple", "violet")}
            wanted = words.get(sample.facts.background, (sample.facts.background,))
            assert any(word in sample.caption for word in wanted)


def test_stated_sizes_and_places_are_in_the_words(samples):
    for sample in samples:
        if 32 in sample.facts.sizes:
            assert any(word in sample.caption for word in ("small", "little", "tiny"))
        if 96 in sample.facts.sizes:
            assert any(word in sample.caption for word in ("big", "large", "huge", "giant"))
        if sample.facts.column == 0:
            assert "left" in sample.caption
        if sample.facts.row == 2:
            assert "bottom" in sample.caption


def test_training_never_shows_what_is_held_out():
    random = np.random.default_rng(5)
    for _ in range(300):
        sample = captions.training_sample(random)
        name = sample.scene.backdrop.name
        assert not captions.has_held_out_pair(sample.facts.objects, name)


@pytest.mark.parametrize("kind", captions.KINDS)
def test_held_out_samples_hold_a_held_out_pair(kind):
    random = np.random.default_rng(6)
    for _ in range(10):
        sample = captions.held_out_sample(kind, random)
        name = sample.scene.backdrop.name
        assert sample.facts.kind == kind
        assert captions.has_held_out_pair(sample.facts.objects, name)


def test_a_tenth_of_the_pairs_is_held_out_whatever_their_order():
    pairs = [(a, b) for a in range(120) for b in range(a + 1, 120)]
    share = np.mean([captions.is_held_out(a, b) for a, b in pairs])
    assert 0.07 < share < 0.13
    assert all(captions.is_held_out(a, b) == captions.is_held_out(b, a) for a, b in pairs[:500])
    assert not captions.is_held_out(4, 4)
    for name in scenes.BACKGROUNDS:
        assert 4 < sum(captions.is_held_out(a, name) for a in range(120)) < 20


def test_samples_repeat_with_the_seed():
    one, two = (captions.training_sample(np.random.default_rng(9)) for _ in range(2))
    assert one == two
    assert np.array_equal(scenes.render(one.scene), scenes.render(two.scene))


def test_a_render_differs_from_its_backdrop_only_under_the_sprites(samples):
    for sample in samples[::25]:
        picture = scenes.render(sample.scene)
        assert picture.shape == (128, 128, 3)
        assert picture.dtype == np.uint8
        empty = scenes.render(scenes.Scene(backdrop=sample.scene.backdrop, sprites=()))
        outside = np.ones((128, 128), bool)
        for s in sample.scene.sprites:
            box = slice(s.y, s.y + s.size), slice(s.x, s.x + s.size)
            assert not np.array_equal(picture[box], empty[box])
            outside[box] = False
        assert np.array_equal(picture[outside], empty[outside])


@pytest.mark.parametrize("name", scenes.BACKGROUNDS)
def test_backdrops_are_pictures(name):
    backdrop = scenes.random_backdrop(name, np.random.default_rng(1))
    picture = scenes.draw_backdrop(backdrop)
    assert picture.shape == (128, 128, 3)
    assert 0 <= picture.min() <= picture.max() <= 255
    assert backdrop.horizon in scenes.HORIZONS


def test_token_classes_name_the_object_over_each_token():
    backdrop = scenes.Backdrop(name="red", horizon=64, tint=0, seed=0)
    sprites = (scenes.Sprite(index=7, size=32, x=16, y=48), scenes.Sprite(index=3, size=64, x=64, y=0))
    classes = scenes.token_classes(scenes.Scene(backdrop=backdrop, sprites=sprites))
    assert classes.shape == (8, 8)
    assert (classes[3:5, 1:3] == 7).all()
    assert (classes[0:4, 4:8] == 3).all()
    assert (classes == 120).sum() == 64 - 4 - 16
