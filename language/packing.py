"""A language model whose big matrices stay in few bits."""

from torch import nn

from ..core.ops.packed import Kind, PackingReport, pack_linears
from .model import LanguageModel


def pack_language_model(model: LanguageModel, kind: Kind) -> PackingReport:
    """Pack every matrix of `model`, in place, and report the error. The head too: where it is the embedding, the
    embedding stays as it is beside it, since of that a token reads one row only. Experts stay as they are.

    Raises:
        ValueError: an unknown kind, or weights without values.
    """
    if model.head is None:
        vocab_size, width = model.embedding.weight.shape
        model.head = nn.Linear(width, vocab_size, bias=False, device="meta")
        model.head.weight = model.embedding.weight
    return pack_linears(model, kind)
