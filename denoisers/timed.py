"""What denoisers share whose blocks cross-attend to states that never change, and whose modulations are a table of each
block plus a projection of time, tokens of known frames being told time 0 (Wan, LTX-Video).

Legend: B rows, E evaluations, C latent channels, F frames, h w latent cells, H heads, Dh width of a head, D width,
Lc states.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..core.attention.base import FULL, AttentionMask, AttentionSelector
from ..core.blocks.cross import by_head
from ..core.modulation import Modulation, Stretches
from ..core.rotary import Rotary
from ..core.stream import BlockInputs, KeysValues, Runner
from .hoisting import HoistingModule, gated, ungated


@dataclass(frozen=True, kw_only=True, eq=False)
class TimedPrepared:
    """All that one run needs and that does not depend on the latents.

    `crossed[i]` are the keys and values of what block i attends to. Block i's modulations at evaluation e come from
    `tables[i] + projections[e]`, the output layer's from `final_table + embedded[e]`; the last rows of both are those
    of time 0. `lengths`: tokens of known frames, and of the others. `mask` is that of tokens among themselves.
    `places[index]` finds e by a point's index.
    """

    crossed: Sequence[Sequence[KeysValues]]
    lengths: tuple[int, int]
    rotary: Rotary
    mask: AttentionMask
    attention: AttentionSelector
    runner: Runner
    tables: Tensor  # [blocks, 6 D], float32
    projections: Tensor  # [E + 1, 6 D]
    final_table: Tensor  # [2, D], float32
    embedded: Tensor  # [E + 1, D]
    places: Mapping[int, int]

    def inputs(self, e: int) -> BlockInputs:
        """What the blocks read in evaluation e."""
        rows, lengths = zip(*self._stretches(e), strict=True)
        classes = [gated((self.tables + self.projections[row])[:, None], 2) for row in rows]
        modulation = [
            [_joined(parts, lengths) for parts in zip(*each, strict=True)] for each in zip(*classes, strict=True)
        ]
        return BlockInputs(
            rotary=self.rotary, mask=self.mask, attention=self.attention, modulation=modulation, crossed=self.crossed
        )

    def final(self, e: int) -> Modulation:
        """That of the output layer in evaluation e."""
        rows, lengths = zip(*self._stretches(e), strict=True)
        tables = [(self.final_table + self.embedded[row]).flatten()[None, None] for row in rows]
        return _joined([ungated(table)[0] for table in tables], lengths)

    def _stretches(self, e: int) -> list[tuple[int, int]]:
        """The row of the tables, and how many tokens it is of, one stretch after the other: those of time 0, and of
        evaluation e."""
        return [(row, length) for row, length in zip((-1, e), self.lengths, strict=True) if length]


def _joined(parts: Sequence[Modulation], lengths: tuple[int, ...]) -> Modulation:
    """One modulation of all tokens, of those for each stretch."""
    return parts[0] if len(parts) == 1 else Stretches(lengths=lengths, parts=parts)


def keys_values(
    module: HoistingModule, kind: str, i: int, states: Tensor, *, heads: int, mask: AttentionMask = FULL
) -> KeysValues:
    """Those of states [B, Lc, D] for block i: by `{kind}_keys_values`, keys normalised by `{kind}_key_norms`."""
    keys, values = module.projected(f"{kind}_keys_values.{i}", states).chunk(2, dim=-1)
    keys = module.get_submodule(f"{kind}_key_norms.{i}")(keys)
    ours = (by_head(each[:, None], heads).contiguous() for each in (keys, values))
    return KeysValues(keys=next(ours), values=next(ours), mask=mask)
