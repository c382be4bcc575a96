"""What a model family is, and typed reading of a transformers config."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ...core.key_map import KeyMap
from ...core.mlp import Activation
from ..config import LanguageModelConfig
from .rotary import positive, read_rotary

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the transformers checkpoints of one kind of model are read: names, config, and key map for the config."""

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    config: Callable[[Mapping[str, Any]], LanguageModelConfig]
    key_map: Callable[[LanguageModelConfig], KeyMap]


@dataclass(frozen=True)
class Entries:
    """The entries of a transformers config, each of the type asked for.

    Every method raises ValueError for an entry that is missing without a default, of another type, or out of range.
    """

    values: Mapping[str, Any]

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number over 0."""
        value = self.optional_size(name, default)
        if value is None:
            raise ValueError(f"the config has no {name}")
        return value

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        """A whole number over 0, or None where the entry is null, or missing without a default."""
        value: object = self.values.get(name, default)
        if value is None:
            return None
        if type(value) is not int or value < 1:
            raise ValueError(f"the config's {name} is {value!r}; it must be a whole number over 0")
        return value

    def number(self, name: str, default: float) -> float:
        """A number over 0."""
        value: object = self.values.get(name, default)
        return positive(value, f"the config's {name}")

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value: object = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"the config's {name} is {value!r}; it must be true or false")
        return value

    def words(self, name: str) -> tuple[str, ...] | None:
        """A list of words, or None where it is missing."""
        value: object = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) for each in cast(list[object], value)):
            raise ValueError(f"the config's {name} is {value!r}; it must be a list of words")
        return tuple(cast(list[str], value))

    def refuse(self, *names: str) -> None:
        """Entries that ask for what these blocks do not do: they must be missing, null, false or 0."""
        for name in names:
            if self.values.get(name):
                raise ValueError(f"the config's {name} is {self.values[name]!r}, which is not supported")

    def activation(self, name: str, default: str) -> Activation:
        """The MLP's activation."""
        value: object = self.values.get(name, default)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise ValueError(f"the config's {name} is {value!r}; supported are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]


def text_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the text part of a model that also sees; those of a text model themselves.

    Raises:
        ValueError: `text_config` is not an object.
    """
    found: object = entries.get("text_config", entries)
    if not isinstance(found, Mapping):
        raise ValueError(f"the config's text_config is {found!r}; it must be an object")
    return dict(cast(Mapping[str, Any], found))


def plain_config(entries: Entries, *, theta: float = 10000.0, tie_embeddings: bool = False) -> LanguageModelConfig:
    """What all families share: sizes, norms, rotary embedding; `theta`, `tie_embeddings` where the config is silent."""
    width, heads = entries.size("hidden_size"), entries.size("num_attention_heads")
    context = entries.size("max_position_embeddings", 2048)
    base, scaling = read_rotary(entries.values, theta=theta, context=context)
    return LanguageModelConfig(
        vocab_size=entries.size("vocab_size"),
        width=width,
        layers=entries.size("num_hidden_layers"),
        heads=heads,
        kv_heads=entries.optional_size("num_key_value_heads") or heads,
        head_width=entries.optional_size("head_dim") or width // heads,
        hidden=entries.size("intermediate_size"),
        norm_eps=entries.number("rms_norm_eps", 1e-6),
        rope_theta=base,
        rope_scaling=scaling,
        activation=entries.activation("hidden_act", "silu"),
        context_length=context,
        tie_embeddings=entries.flag("tie_word_embeddings", tie_embeddings),
    )


def sliding_layers(entries: Entries, layers: int) -> tuple[bool, ...] | None:
    """Which layers slide, by the config's `layer_types`; None where it has none.

    Raises:
        ValueError: a kind of layer that is neither sliding nor full attention, or another number of layers.
    """
    kinds = entries.words("layer_types")
    if kinds is None:
        return None
    known = ("full_attention", "sliding_attention")
    if len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ValueError(f"the config's layer_types are {list(kinds)}; there must be {layers}, of {', '.join(known)}")
    return tuple(kind == "sliding_attention" for kind in kinds)
