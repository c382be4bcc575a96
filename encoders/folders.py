"""Text encoders of transformers from local folders or weights files: their weights through our own loader, their
tokenizers, no output.

transformers' own loading accepts keys that match nothing, prints, and can read pickles; ours does none of these.
"""

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..core.checkpoint import Files
from ..core.component_files import refuse_quantised_entries, stem_weights
from ..core.key_map import KeyMap, named_weights
from ..core.key_rules import Layout, Rule
from ..core.loading import build_on_meta
from ..core.offload import StoredWeights, filled
from ..language.checkpoints import ModelSource, StoredModel, config_place, read_entries


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model of transformers: the names of its classes, and how names in its files differ from the module's:
    `prefixes` that all may have, `drops` that stand for nothing (of a copied parameter, or of a constant), `renamed`
    for (file, module) where a parameter is stored under its other name, `wide` for linears that stay in float32 where
    all else is float16. `identities` are linears that change nothing, whatever the files hold of them; `others` gives
    further layouts of a module's files.
    """

    model: str
    config: str
    prefixes: tuple[str, ...] = ("",)
    drops: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    wide: tuple[str, ...] = ()
    identities: tuple[str, ...] = ()
    others: Callable[[nn.Module], tuple[Layout, ...]] = lambda module: ()

    def key_map(self, module: nn.Module) -> KeyMap:
        """Every parameter under its own name, or some under their other names."""
        names = tuple(named_weights(module))
        other = {target: source for source, target in self.renamed}
        drops = (*self.drops, *(f"{name}.weight" for name in self.identities))
        layouts = [Layout(self.model, tuple(Rule(name, name) for name in names), drops, self.prefixes)]
        if other:
            rules = tuple(Rule(other.get(name, name), name) for name in names)
            layouts.append(Layout(f"{self.model}, other names", rules, (), self.prefixes))
        return KeyMap((*layouts, *self.others(module)))


def model_source(model: str | ModelSource) -> ModelSource:
    """The folder of that name, or the model in a file."""
    return Path(model) if isinstance(model, str) else model


def text_architecture(source: ModelSource, known: tuple[Architecture, ...]) -> Architecture:
    """Which of the known architectures a model's config names.

    Raises:
        FileNotFoundError: no such folder, or no config.json in it. ValueError: another architecture.
    """
    if isinstance(source, Path) and not source.is_dir():
        raise FileNotFoundError(f"no folder at {source}")
    named: object = read_entries(source).get("architectures")
    names = [str(name) for name in cast(list[object], named)] if isinstance(named, list) else []
    found = [each for each in known if each.model in names]
    if not found:
        wanted = " or ".join(each.model for each in known)
        raise ValueError(f"{config_place(source)} names {', '.join(names) or 'no architecture'}; needed is {wanted}")
    return found[0]


def load_text_model(
    source: ModelSource,
    architecture: Architecture,
    *,
    variant: str | None,
    device: torch.device | str,
    dtype: torch.dtype,
) -> tuple[Any, StoredWeights | None]:
    """The model, for evaluation and without gradients; on the meta device, with where its weights lie.

    Raises:
        FileNotFoundError: the weights, or a shard, are missing.
        ValueError: a config that makes no sense, quantised or pickled weights, weights that do not fit the config.
    """
    config, place = _config(source, architecture), config_place(source)
    files = source.files if isinstance(source, StoredModel) else _weights(source, variant)
    with quiet():
        module = build_on_meta(lambda: _built(architecture, config, place)).to(dtype)
    for name, part in module.named_modules():
        if dtype is torch.float16 and name.rpartition(".")[2] in architecture.wide:
            part.to(torch.float32)
    _fill_positions(module)
    identities = {name: cast(nn.Linear, module.get_submodule(name)) for name in architecture.identities}
    for linear in identities.values():
        linear.register_parameter("weight", None)
    stored = filled(module, files, architecture.key_map(module), device=device)
    for linear in identities.values():
        eye = torch.eye(linear.out_features, dtype=dtype, device=None if stored is not None else device)
        linear.register_parameter("weight", nn.Parameter(eye))
    return module.requires_grad_(False).eval(), stored


def load_prompt_tokenizer(folder: Path, kind: str, files: tuple[tuple[str, ...], ...]) -> Any:
    """The tokenizer of a folder as transformers' class `kind` reads it, from tokenizer.json or one group of `files`.

    Raises:
        FileNotFoundError: no such folder, or no tokenizer in it. ValueError: files that cannot be read.
    """
    groups = (("tokenizer.json",), *files)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder at {folder}")
    if not any(all((folder / name).is_file() for name in group) for group in groups):
        wanted = " or ".join(" with ".join(group) for group in groups)
        raise FileNotFoundError(f"no tokenizer in {folder}; it needs {wanted}")
    with quiet():
        import transformers

        try:
            return getattr(transformers, kind).from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # whatever the many converters raise
            raise ValueError(f"{folder} holds no tokenizer that transformers' {kind} can read ({error})") from error


@contextmanager
def quiet() -> Generator[None, None, None]:
    """Keeps what transformers logs in this thread from being printed; other threads, and levels, stay as they are."""
    from transformers.utils import logging as library

    library.get_verbosity()  # sets the library's handler up
    handlers, this = logging.getLogger("transformers").handlers[:], threading.get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        return record.thread != this

    for handler in handlers:
        handler.addFilter(is_other)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_other)


def _config(source: ModelSource, architecture: Architecture) -> Any:
    entries, place = dict(read_entries(source)), config_place(source)
    refuse_quantised_entries(place.parent, entries)
    for name in ("dtype", "torch_dtype"):  # parts of models would be made in it
        entries.pop(name, None)
    with quiet():
        import transformers

        try:
            return getattr(transformers, architecture.config).from_dict(entries)
        except Exception as error:  # transformers checks configs with many classes of errors
            raise ValueError(f"{place}: {error}") from error


def _built(architecture: Architecture, config: Any, place: Path) -> nn.Module:
    import transformers

    try:
        return getattr(transformers, architecture.model)(config)
    except Exception as error:  # sizes that do not fit each other fail in many ways
        raise ValueError(f"{place}: no {architecture.model} can be made of it ({error})") from error


def _weights(folder: Path, variant: str | None) -> Files:
    """The file with the weights, or the index of its shards."""
    weights = stem_weights(folder, "model", variant or None)
    if weights is not None:
        return weights
    part = f".{variant}" if variant else ""
    found = sorted(file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".ckpt"))
    if found and not any(name.endswith(".safetensors") for name in found):
        raise ValueError(f"{folder}: only pickled weights ({found[0]}), which are never loaded; convert them")
    raise FileNotFoundError(f"no model{part}.safetensors in {folder}; it holds {', '.join(found) or 'no weights'}")


def _fill_positions(module: nn.Module) -> None:
    """Positions are counted, not stored."""
    for owner in module.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            if name == "position_ids":
                setattr(owner, name, torch.arange(buffer.shape[-1])[None])
