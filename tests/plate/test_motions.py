"""Clips: where objects are in each frame, the words, what is held out, and the judge of clips."""

import numpy as np
import pytest

from calotype.plate.training import clip_judge, motions, scenes
from calotype.plate.training.objects import object_names


@pytest.fixture(scope="module")
def clips():
    random = np.random.default_rng(3)
    return [motions.random_clip(kind, random) for kind in ("one", "two", "still") for _ in range(60)]


def clip_of(motion, index=0, background="grass"):
    random = np.random.default_rng(index)
    actor = motions.Actor(index=index, motion=motion, poses=motions.poses_of(motion, 32, 32))
    backdrop = scenes.random_backdrop(background, random)
    return motions.Clip(backdrop=backdrop, actors=(actor,), caption="", background=background)


def test_objects_stay_inside_and_never_overlap(clips):
    for clip in clips:
        for frame in range(motions.FRAMES):
            covered = np.zeros((128, 128), int)
            for actor in clip.actors:
                pose = actor.poses[frame]
                assert min(pose.x, pose.y) >= 0 and max(pose.x, pose.y) + pose.size <= 128
                covered[pose.y : pose.y + pose.size, pose.x : pose.x + pose.size] += 1
            assert covered.max() == 1


def test_key_frames_are_as_in_pictures_and_steps_are_even(clips):
    """Or half as wide, the one pose that pictures do not show."""
    for clip in clips:
        for actor in clip.actors:
            for frame in motions.key_frames():
                pose = actor.poses[frame]
                assert pose.x % scenes.GRID == pose.y % scenes.GRID == 0
                assert pose.size in (scenes.SMALL, scenes.MEDIUM, scenes.LARGE)
                assert pose.angle == 0 or (actor.motion == "spin" and pose.angle in (60, 120, 180, 240))
            for before, after in zip(actor.poses, actor.poses[1:], strict=False):
                assert max(abs(after.x - before.x), abs(after.y - before.y)) <= motions.STEP
                assert abs(after.size - before.size) <= motions.GROWTH


@pytest.mark.parametrize(
    ("motion", "first", "last"),
    [
        ("left", (64, 64, 32), (64, 0, 32)),
        ("right", (64, 0, 32), (64, 64, 32)),
        ("up", (64, 32, 64), (64, 32, 0)),
        ("down", (64, 32, 0), (64, 32, 64)),
        ("grow", (32, 48, 48), (96, 16, 16)),
        ("shrink", (96, 16, 16), (32, 48, 48)),
        ("bounce", (64, 32, 64), (64, 32, 64)),
        ("spin", (64, 32, 32), (64, 32, 32)),
    ],
)
def test_where_a_motion_leads(motion, first, last):
    poses = motions.poses_of(motion, 32, 32)
    assert len(poses) == motions.FRAMES
    assert (poses[0].size, poses[0].x, poses[0].y) == first
    assert (poses[-1].size, poses[-1].x, poses[-1].y) == last
    assert len({*poses}) > motions.GROUP
    assert (poses[0].angle, poses[4].angle, poses[-1].angle) == ((0, 60, 240) if motion == "spin" else (0, 0, 0))


def test_captions_say_who_does_what(clips):
    for clip in clips:
        assert clip.caption == clip.caption.lower() and "  " not in clip.caption
        for actor in clip.actors:
            entry = object_names()[actor.index]
            assert any(word in clip.caption for word in (entry.name, entry.plural, *entry.synonyms))
            verbs = motions._VERBS.get(actor.motion, ("",))
            forms = [
                form
                for verb in verbs
                for form in (verb, " ".join((motions._of_many(verb.split()[0]), *verb.split()[1:])) if verb else "")
            ]
            assert any(form in clip.caption for form in forms)


@pytest.mark.parametrize(("one", "many"), [("moves", "move"), ("flies", "fly"), ("goes", "go"), ("rises", "rise")])
def test_verbs_agree(one, many):
    assert motions._of_many(one) == many


def test_training_never_shows_what_is_held_out():
    random = np.random.default_rng(7)
    assert not any(motions._is_held_out(motions.training_clip(random)) for _ in range(100))
    assert all(motions._is_held_out(motions.held_out_clip("one", random)) for _ in range(10))


def test_classes_are_where_the_object_is():
    clip = clip_of("right", index=5)
    first, last = (motions.clip_classes(clip, frame) for frame in (0, 16))
    assert (first[2:6, :4] == 5).all() and (first == 5).sum() == 16
    assert (last[2:6, 4:] == 5).all() and (last == 5).sum() == 16


def test_classes_of_one_that_spins_are_as_narrow_as_it_is_seen():
    clip = clip_of("spin", index=5)
    for frame, columns in ((0, slice(2, 6)), (4, slice(3, 5)), (8, slice(3, 5)), (12, slice(2, 6))):
        classes = motions.clip_classes(clip, frame)
        assert (classes[2:6, columns] == 5).all() and (classes == 5).sum() == 4 * (columns.stop - columns.start)


def test_a_sprite_of_a_known_size_is_that_of_pictures_and_turns_about_its_upright_axis():
    front = scenes.sprite_pixels(64)[3]
    assert np.array_equal(motions.posed(3, 64, 0), front)
    assert np.abs(motions.posed(3, 64, 180) - front).mean() < 1
    for angle, columns in ((45, 46), (60, 32), (90, 32), (120, 32), (225, 46), (270, 32)):
        turned = motions.posed(3, 64, angle)
        beside = (64 - columns) // 2
        assert not turned[:, :beside].any() and not turned[:, 64 - beside :].any()
        assert turned[..., 3].sum() == pytest.approx(front[..., 3].sum() * columns / 64, rel=0.03)


def test_the_judge_accepts_true_clips(clips):
    for clip in (clips[0], clips[60], clips[120]):
        verdict = clip_judge.judge_clip(motions.render_clip(clip), clip)
        assert verdict.right, (clip.caption, verdict.why)
        assert verdict.flicker == 0
        assert verdict.edges == pytest.approx((1, 1), abs=0.1)


def test_the_judge_rejects_another_object_motion_or_background():
    clip = clip_of("left", index=4)
    frames = motions.render_clip(clip)
    others = (clip_of("left", index=9), clip_of("right", index=4))
    for other in others:
        verdict = clip_judge.judge_clip(frames, other)
        assert not verdict.objects
        assert not verdict.right
    verdict = clip_judge.judge_clip(frames, clip_of("left", index=4, background="night"))
    assert (verdict.background, verdict.right, verdict.why) == (False, False, "background is grass")
    late = clip_judge.judge_clip(frames[[0, *range(16)]], clip)  # a frame late: 4 pixels
    assert late.motion and late.right


@pytest.mark.parametrize("motion", motions.ONE)
def test_the_judge_rejects_what_does_not_move(motion):
    clip = clip_of(motion, index=4)
    assert not clip_judge.judge_clip(np.repeat(motions.render_clip(clip, [0]), motions.FRAMES, axis=0), clip).right


def test_the_judge_measures_blur_and_flicker():
    clip = clip_of("up", index=4)
    frames = motions.render_clip(clip).astype(np.float32)
    flashing = frames + 6 * (np.arange(17) % 2)[:, None, None, None]
    assert clip_judge.flicker(flashing, clip) == pytest.approx(6)
    blurred = frames.copy()
    blurred[1::2] = (frames[1::2] + np.roll(frames[1::2], 2, axis=2)) / 2
    keys, others = clip_judge.judge_clip(np.clip(blurred, 0, 255).astype(np.uint8), clip).edges
    assert others < 0.8 * keys


def test_the_test_set_is_fixed():
    first, second = (clip_judge.held_out_clips("two", 3) for _ in range(2))
    assert [c.caption for c in first] == [c.caption for c in second]
    assert all(len(c.actors) == 2 and c.background is not None for c in first)
    assert "clips" in clip_judge.table([clip_judge.judge_clip(motions.render_clip(c), c) for c in first[:1]])
