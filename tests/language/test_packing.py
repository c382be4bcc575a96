import pytest
import torch
from torch import nn

from calotype.core.moe import ExpertsConfig
from calotype.core.ops.packed import PackedLinear
from calotype.core.ops.packed_matrix import Kind
from calotype.core.ops.row_product import Linear
from calotype.language.model import LanguageModel, LanguageModelConfig
from calotype.language.packing import pack_language_model


def model(*, tied: bool = True, experts: ExpertsConfig | None = None) -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageModelConfig(
        vocab_size=80,
        width=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_width=16,
        hidden=96,
        experts=experts,
        tie_embeddings=tied,
    )
    made = LanguageModel(config).requires_grad_(False)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    return made


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "limit"), [("int8", 0.03), ("int4", 0.3), ("w8a8", 0.06)])
def test_logits_stay_near_and_the_report_tells_all_matrices(kind: Kind, limit: float, tied: bool) -> None:
    packed, ids = model(tied=tied), torch.tensor([[3, 1, 4, 1, 5]])
    wanted, embedding = packed.logits(ids), packed.embedding.weight
    report = pack_language_model(packed, kind)
    names = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")
    assert [each.name for each in report.weights] == [f"blocks.{i}.{name}" for i in range(2) for name in names] + [
        "head"
    ]
    assert {each.kind for each in report.weights[:-1]} == {kind}
    assert report.weights[-1].kind == ("w8a8" if kind == "w8a8" else "int8")
    assert report.weights[-1].bytes_before == (0 if tied else 4 * 80 * 64)
    assert packed.embedding.weight is embedding and isinstance(packed.head, PackedLinear)
    assert not any(type(each) is nn.Linear for each in packed.modules())
    found = packed.logits(ids)
    assert 0 < float((found - wanted).norm() / wanted.norm()) < limit


def test_w8a8_rows_of_a_batch_are_what_they_are_alone() -> None:
    packed, ids = model(), torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    pack_language_model(packed, "w8a8")
    together, alone = packed.logits(ids), torch.cat([packed.logits(row[None]) for row in ids])
    assert float((together - alone).norm() / alone.norm()) < 2e-3  # where a number lies between two steps


def test_routers_and_experts_stay() -> None:
    packed = model(experts=ExpertsConfig(count=4, active=2, hidden=32))
    report = pack_language_model(packed, "int8")
    assert len(report.weights) == 5 and sum(type(each) is Linear for each in packed.modules()) == 2


def test_unknown_kinds_change_nothing() -> None:
    packed = model()
    with pytest.raises(ValueError, match="cannot be packed as 'int3'"):
        pack_language_model(packed, "int3")  # pyright: ignore[reportArgumentType]
    assert packed.head is None and not any(isinstance(each, PackedLinear) for each in packed.modules())
