"""How the names in a checkpoint become the parameters of a model, written down as rules.

    KeyMap((
        Layout("diffusers", (
            Rule(("blocks.{i}.attn.to_q.{leaf}", "blocks.{i}.attn.to_k.{leaf}", "blocks.{i}.attn.to_v.{leaf}"),
                 "blocks.{i}.attention.qkv.{leaf}"),
            Rule("patch.weight", "patch.weight", (Reshape((0, -1)),)),
        ), drops=("pos_embed.{any*}",), prefixes=("", "model.diffusion_model.")),
        Layout("original", ...),
    ))

Several sources of a rule are joined on dim 0 in the order written. Placeholders: `{i}` (one letter) is a number,
`{leaf}` (longer) one word without dots, `{any*}` anything. Two rules may fill the same parameter from different
keys, so that files of either kind load; a file with both is refused. Operations work on rows (dim 0) or reshape, so a
rule can place the factors of a LoRA as well as the weight itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from .key_matching import Attempt, attempt, report
from .key_rules import Fill, Layout, Part, PlacedPart, Rule
from .row_operations import Operation, Reshape, RowPermutation, Rows, Shape, Share

__all__ = [
    "Fill",
    "KeyMap",
    "Layout",
    "Operation",
    "Part",
    "PlacedPart",
    "Reshape",
    "RowPermutation",
    "Rows",
    "Rule",
    "Share",
    "identity_key_map",
    "named_weights",
]


@dataclass(frozen=True)
class KeyMap:
    """The layouts in which a model's checkpoints come; the first that fits is taken."""

    layouts: tuple[Layout, ...]

    def plan(
        self, sources: Mapping[str, Shape], targets: Mapping[str, Shape], *, origin: str = "the checkpoint"
    ) -> dict[str, Fill]:
        """Where each parameter in `targets` comes from, given the shapes of the checkpoint's tensors.

        Every tensor must be used, in full, or dropped by name, and every parameter filled exactly once; else ValueError
        says how many are not, gives examples and names the layout that comes nearest. `origin` begins the message.
        """
        attempts: list[Attempt] = []
        for layout in self.layouts:
            for prefix in layout.prefixes:
                attempts.append(attempt(layout, prefix, sources, targets))
                if attempts[-1].fits:
                    return attempts[-1].fills
        raise ValueError(f"{origin} does not fit the model: {report(attempts, sources, targets)}")


def identity_key_map(module: nn.Module) -> KeyMap:
    """The map of our own files: every key is the name of a parameter or persistent buffer."""
    return KeyMap((Layout("calotype", tuple(Rule(name, name) for name in named_weights(module))),))


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a module, by name; shared ones once, by their first name."""
    names: dict[int, str] = {}
    weights: dict[str, Tensor] = module.state_dict(keep_vars=True)
    for name, weight in weights.items():
        names.setdefault(id(weight), name)
    return {name: weights[name] for name in names.values()}
