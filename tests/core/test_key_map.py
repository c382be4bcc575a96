import pytest
import torch
from torch import nn

from calotype.core.key_map import (
    KeyMap,
    Layout,
    Part,
    PlacedPart,
    Reshape,
    RowPermutation,
    Rows,
    Rule,
    Share,
    identity_key_map,
    named_weights,
)
from calotype.core.row_operations import apply_shape, apply_view

QKV = tuple(f"blocks.{{i}}.attn.to_{part}.{{leaf}}" for part in "qkv")
DIFFUSERS = Layout(
    "diffusers",
    (
        Rule(QKV, "blocks.{i}.qkv.{leaf}"),
        Rule("blocks.{i}.attn.qkv_proj.{leaf}", "blocks.{i}.qkv.{leaf}"),
        Rule("patch.weight", "patch.weight", (Reshape((0, -1)),)),
    ),
    drops=("pos_embed.{any*}",),
    prefixes=("", "model.diffusion_model."),
)
ORIGINAL = Layout(
    "original",
    (
        Rule("double.{i}.linear1.{leaf}", "blocks.{i}.qkv.{leaf}"),
        Rule("img_in.weight", "patch.weight"),
    ),
)
MAP = KeyMap((DIFFUSERS, ORIGINAL))
TARGETS = {"blocks.0.qkv.weight": (8, 4), "blocks.11.qkv.weight": (8, 4), "patch.weight": (4, 12)}
SOURCES = {
    **{
        f"blocks.{i}.attn.to_{part}.weight": (rows, 4)
        for i in (0, 11)
        for part, rows in zip("vkq", (2, 2, 4), strict=True)
    },
    "patch.weight": (4, 3, 2, 2),
    "pos_embed.table.weight": (7,),
}


def message(key_map: KeyMap, sources: dict[str, tuple[int, ...]], targets: dict[str, tuple[int, ...]] = TARGETS) -> str:
    with pytest.raises(ValueError) as caught:
        key_map.plan(sources, targets, origin="file.safetensors")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def result(x: torch.Tensor, *operations) -> torch.Tensor:
    return apply_view(operations, x).reshape(apply_shape(operations, tuple(x.shape)))


def test_sources_are_joined_in_the_order_of_the_rule() -> None:
    plan = MAP.plan(SOURCES, TARGETS)
    assert set(plan) == set(TARGETS)
    assert plan["blocks.11.qkv.weight"].parts == (
        PlacedPart(source="blocks.11.attn.to_q.weight", operations=(), start=0, stop=4),
        PlacedPart(source="blocks.11.attn.to_k.weight", operations=(), start=4, stop=6),
        PlacedPart(source="blocks.11.attn.to_v.weight", operations=(), start=6, stop=8),
    )


def test_prefix_layout_and_rule_alternatives() -> None:
    prefixed = {f"model.diffusion_model.{key}": shape for key, shape in SOURCES.items()}
    assert MAP.plan(prefixed, TARGETS)["patch.weight"].parts[0].source == "model.diffusion_model.patch.weight"
    fused = {
        "blocks.0.attn.qkv_proj.weight": (8, 4),
        **{k: v for k, v in SOURCES.items() if not k.startswith("blocks.0.")},
    }
    assert MAP.plan(fused, TARGETS)["blocks.0.qkv.weight"].parts[0].source == "blocks.0.attn.qkv_proj.weight"
    original = {"double.0.linear1.weight": (8, 4), "double.11.linear1.weight": (8, 4), "img_in.weight": (4, 12)}
    assert len(MAP.plan(original, TARGETS)) == 3


def test_unmatched_key_is_refused_with_counts_and_the_nearest_layout() -> None:
    text = message(MAP, {**SOURCES, "blocks.0.extra.weight": (1,)})
    assert text.startswith("file.safetensors does not fit the model: 1 of 9 keys match nothing (blocks.0.extra.weight)")
    assert "nearest known layout is 'diffusers' (known: diffusers, original)" in text


def test_unfilled_parameter_names_the_absent_key() -> None:
    sources = {key: shape for key, shape in SOURCES.items() if key != "blocks.11.attn.to_v.weight"}
    text = message(MAP, sources)
    assert "1 of 3 parameters have no value (blocks.11.qkv.weight from blocks.11.attn.to_v.weight)" in text
    assert "match nothing" not in text


def test_a_key_whose_parameter_the_model_lacks_matches_nothing() -> None:
    text = message(MAP, {**SOURCES, **{f"blocks.{i}.attn.to_q.bias": (4,) for i in range(5)}})
    assert (
        "5 of 13 keys match nothing (blocks.0.attn.to_q.bias, blocks.1.attn.to_q.bias, blocks.2.attn.to_q.bias, ...)"
        in text
    )


def test_parts_beside_a_complete_alternative_are_not_ignored() -> None:
    text = message(MAP, {**SOURCES, "blocks.0.attn.qkv_proj.weight": (8, 4)})
    assert "blocks.0.qkv.weight has 2 values" in text
    sources = {key: shape for key, shape in SOURCES.items() if key != "blocks.0.attn.to_v.weight"}
    assert "2 of 8 keys match nothing" in message(MAP, {**sources, "blocks.0.attn.qkv_proj.weight": (8, 4)})


def test_nothing_matches_at_all() -> None:
    text = message(MAP, {"conv.weight": (3,)})
    assert "1 of 1 keys match nothing (conv.weight)" in text
    assert "known layouts: diffusers, original" in text
    assert "keys such as blocks.{i}.attn.to_q.{leaf}" in text


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("a.weight.absmax", "bitsandbytes"),
        ("a.wscales", "Nunchaku"),
        ("a.qzeros", "GPTQ"),
        ("a.lora_A.weight", "a LoRA, not a model"),
        ("a.scale_weight", "scaled float8"),
    ],
)
def test_foreign_formats_are_named(key: str, what: str) -> None:
    assert what in message(MAP, {key: (1,)})


def test_shape_mismatch_names_both_shapes() -> None:
    text = message(MAP, {**SOURCES, "blocks.0.attn.to_v.weight": (3, 4)})
    assert "1 misfits (blocks.0.qkv.weight: the model has the shape [8, 4], the checkpoint gives" in text
    assert "blocks.0.attn.to_v.weight [3, 4]" in text
    assert "[4, 12]" in message(MAP, {**SOURCES, "patch.weight": (4, 13)})
    assert "cannot take the shape" in message(MAP, {**SOURCES, "patch.weight": ()})


def test_joined_parts_must_agree_in_their_other_dimensions() -> None:
    key_map = KeyMap((Layout("l", (Rule(("a", "b"), "x"),)),))
    assert "[4, 3]" in message(key_map, {"a": (2, 3), "b": (2, 4)}, {"x": (4, 3)})


def test_slices_must_use_every_row_unless_dropped() -> None:
    rules = (Rule("linear1", "qkv", (Rows(0, 6),)), Rule("linear1", "mlp", (Rows(6),)))
    targets = {"qkv": (6, 2), "mlp": (4, 2)}
    assert KeyMap((Layout("l", rules),)).plan({"linear1": (10, 2)}, targets)["mlp"].parts[0].stop == 4
    assert "only 12 of the 20 elements of linear1 are used" in message(
        KeyMap((Layout("l", rules[:1]),)), {"linear1": (10, 2)}, {"qkv": (6, 2)}
    )
    dropping = KeyMap((Layout("l", rules[:1], drops=("linear1",)),))
    assert set(dropping.plan({"linear1": (10, 2)}, {"qkv": (6, 2)})) == {"qkv"}


def test_halves_of_one_key_can_change_places() -> None:
    rule = Rule((Part("norm.{leaf}", (Share(1, 2),)), Part("norm.{leaf}", (Share(0, 2),))), "norm.{leaf}")
    fill = KeyMap((Layout("l", (rule,)),)).plan({"norm.weight": (6, 2)}, {"norm.weight": (6, 2)})["norm.weight"]
    x = torch.arange(12.0).view(6, 2)
    assert torch.equal(torch.cat([result(x, *part.operations) for part in fill.parts]), x.roll(3, 0))


def test_operations() -> None:
    x = torch.arange(24.0).view(12, 2)
    assert torch.equal(result(x, Rows(2, 5)), x[2:5])
    assert torch.equal(result(x, Rows(-3)), x[-3:])
    assert torch.equal(result(x, Share(2, 3)), x[8:])
    assert torch.equal(result(x, Reshape((3, -1))), x.view(3, 8))
    interleaved = RowPermutation((-1, 2, 2), (0, 2, 1))
    order = [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]
    assert torch.equal(result(x, interleaved), x[order])
    assert torch.equal(result(x, interleaved, Rows(1, 4)), x[order][1:4])
    assert torch.equal(result(x, interleaved, Reshape((6, 2, 2)), Share(1, 2)), x[order].view(6, 2, 2)[3:])


def test_operations_act_on_the_row_factor_of_a_lora_as_on_the_weight() -> None:
    up, down = torch.randn(12, 2, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    for operations in ((Share(1, 3),), (Rows(1, 9),), (RowPermutation((3, 2, 2), (0, 2, 1)), Rows(4))):
        assert torch.equal(result(up, *operations) @ down, result(up @ down, *operations))


@pytest.mark.parametrize(
    ("operation", "shape"),
    [
        (Rows(0, 9), (8, 2)),
        (Rows(0, 1), ()),
        (Share(0, 3), (8, 2)),
        (RowPermutation((-1, 3), (1, 0)), (8, 2)),
        (RowPermutation((2, 2), (1, 0)), (8, 2)),
        (Reshape((3, 5)), (8, 2)),
        (Reshape((-1, -1)), (8, 2)),
        (Reshape((0, 0, 0)), (8, 2)),
        (Reshape((0, -1)), (0, 2)),
    ],
)
def test_an_operation_that_does_not_fit_is_refused(operation, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        operation.shape(shape)


def test_rules_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"placeholders of 'a.{j}'"):
        Rule("a.{j}", "b.{i}")
    with pytest.raises(ValueError, match="needs a source"):
        Rule((), "b")
    with pytest.raises(ValueError, match="share 3 of 3"):
        Share(3, 3)
    with pytest.raises(ValueError, match="permutation"):
        RowPermutation((2, -1), (0, 0))
    with pytest.raises(ValueError, match="at most one -1"):
        RowPermutation((-1, -1), (1, 0))


def test_placeholders_match_what_they_say() -> None:
    key_map = KeyMap((Layout("l", (Rule("a.{i}.{leaf}.{i}", "b.{i}.{leaf}"),)),))
    assert key_map.plan({"a.1.w.1": (2,)}, {"b.1.w": (2,)})
    for key in ("a.1.w.2", "a.x.w.x", "a.1.w.v.1", "A.1.w.1", "a.1.w.1.c"):
        assert "match nothing" in message(key_map, {key: (2,)}, {"b.1.w": (2,)})


def test_identity_is_strict_and_names_shared_weights_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("table", torch.zeros(2), persistent=False)

    module = Tied()
    assert list(named_weights(module)) == ["count", "embedding.weight"]
    shapes = {"embedding.weight": (5, 3), "count": ()}
    assert identity_key_map(module).plan(shapes, shapes)["count"].shape == ()
    assert "head.weight" in message(identity_key_map(module), {**shapes, "head.weight": (5, 3)}, shapes)
    assert "no value (count)" in message(identity_key_map(module), {"embedding.weight": (5, 3)}, shapes)


def test_large_maps_are_planned_quickly() -> None:
    import time

    sources = {f"blocks.{i}.attn.to_{part}.weight": (2, 2) for i in range(1000) for part in "qkv"}
    start = time.perf_counter()
    MAP.plan(
        {**sources, "patch.weight": (4, 12)},
        {**{f"blocks.{i}.qkv.weight": (6, 2) for i in range(1000)}, "patch.weight": (4, 12)},
    )
    assert time.perf_counter() - start < 2.0
