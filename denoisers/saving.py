"""Denoisers as diffusers saves them: its class says which tensors there are, our key map where they are held."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..core.diffusers_config import made
from ..core.key_map import KeyMap
from ..core.loading import build_on_meta
from ..core.saving import Component, Weight, as_stored


def in_diffusers_layout(
    name: str, entries: Mapping[str, Any], weights: Mapping[str, Weight], key_map: KeyMap
) -> Component:
    """The component whose class in diffusers is `name`, with these arguments, of `weights` by our names.

    Raises:
        ValueError: they do not fit each other.
    """
    import diffusers

    kind: Callable[..., nn.Module] = getattr(diffusers, name)
    theirs: dict[str, Any] = made(name, lambda: build_on_meta(lambda: kind(**entries))).state_dict()
    return Component(
        entries=stamped(name, entries),
        weights=as_stored(weights, key_map, {key: tuple(tensor.shape) for key, tensor in theirs.items()}),
    )


def stamped(name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a config.json of diffusers' class `name`, with these arguments."""
    import diffusers

    return {"_class_name": name, "_diffusers_version": diffusers.__version__, **entries}
