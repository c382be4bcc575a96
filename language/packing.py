"""Language models with packed weights: fewer bytes for each decoded token, at an error that is reported."""

from ..core.ops.packed import Kind, PackedLinear, PackingReport, pack_linears
from .model import LanguageModel


def pack_language_model(model: LanguageModel, kind: Kind) -> PackingReport:
    """Pack, in place, the matrices that each token is multiplied by; embeddings, routers and experts stay as they are.

    The head gets 8 bits for 4: it is where 4 cost most. A head that is the embedding transposed becomes a packed copy
    beside it, since of an embedding a token reads one row only. Matrices from Q4_0, Q4_1 and Q4_K files keep their
    4-bit grids under "int4".

    Raises:
        ValueError: an unknown kind, or a model without values (meta device).
    """
    report = pack_linears(model, kind, skip=lambda name: name == "head" or name.endswith("router"))
    is_tied = model.head is None
    weight = model.embedding.weight if is_tied else model.get_parameter("head.weight")
    head = PackedLinear(weight, None, "int8" if kind == "int4" else kind)
    model.head = head
    packed = head.report("head", 0 if is_tied else weight.nbytes)
    return PackingReport(weights=(*report.weights, packed))
