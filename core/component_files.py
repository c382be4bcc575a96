"""Which files of a component's folder, in diffusers' or transformers' layout, hold its weights."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast

from .checkpoint import Files, shards_of
from .json_file import json_object

_STEMS = ("diffusion_pytorch_model", "model")
_WEIGHTS = re.compile(
    r"(?P<stem>[^.]+?)(-\d{5}-of-\d{5})?(\.(?P<variant>\w+?))?(?P<shard>-\d{5}-of-\d{5})?\.safetensors"
)
_INDEX = re.compile(
    r"(?P<stem>[^.]+?)(\.(?P<first>\w+))?\.safetensors(\.(?P<middle>(?!index\b)\w+))?\.index(\.(?P<last>\w+))?\.json"
)
_TEXTS = (".json", ".txt", ".model", ".jinja")
_PICKLES = (".bin", ".ckpt", ".pt", ".pth")


def component_weights(folder: Path, variant: str | None = None) -> Path:
    """A file, the index of its shards, or the folder itself where its files have other names.

    Folders may hold copies under other names: `variant`, such as "fp16", picks one.

    Raises:
        FileNotFoundError: no such variant. ValueError: only pickled weights.
    """
    for stem in _STEMS:
        found = stem_weights(folder, stem, variant)
        if found is not None:
            return found
    if variant is not None:
        raise FileNotFoundError(
            f"{folder / f'{_STEMS[0]}.{variant}.safetensors'}: no such file; the folder has no variant {variant!r} of "
            "its weights"
        )
    pickled = sorted(file.name for file in folder.glob("*.bin"))
    if pickled and not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: only pickled weights ({pickled[0]}), which are never loaded; convert them")
    return folder


def stem_weights(folder: Path, stem: str, variant: str | None) -> Path | None:
    """The index of shards, or the file, whose name begins with `stem`; None where there is none. An index names its
    variant last (as diffusers and transformers do), after "safetensors" (diffusers before), or as files do."""
    names = (f"{stem}.safetensors.index.json", f"{stem}.safetensors")
    if variant is not None:
        kinds = (f"safetensors.index.{variant}", f"safetensors.{variant}.index", f"{variant}.safetensors.index")
        names = (*(f"{stem}.{kind}.json" for kind in kinds), f"{stem}.{variant}.safetensors")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def variant_of_weights(name: str) -> str | None:
    """The variant of a weights file by its name; None where it has none, or is not named as such files are."""
    match = _WEIGHTS.fullmatch(name)
    return match["variant"] if match is not None and match["stem"] in _STEMS else None


def is_index(name: str, variant: str | None) -> bool:
    """Whether a file is named as an index of shards that are of this variant (None: of none)."""
    match = _INDEX.fullmatch(name)
    return match is not None and _variant(match) == variant


def has_variant(folder: Path, variant: str) -> bool:
    """Whether a folder's weights come in a variant."""
    try:
        component_weights(folder, variant)
    except FileNotFoundError:
        return False
    return True


def weights_files(path: Path, variant: str | None = None) -> Files:
    """What holds the weights of a component: its folder's files (in the variant, where they come in it), or `path`
    itself, a file; of one of several shards, all."""
    if not path.is_dir():
        return shards_of(path)
    return component_weights(path, variant if variant is not None and has_variant(path, variant) else None)


def component_files(names: Collection[str], folder: str, variant: str | None = None) -> set[str]:
    """Those of a repository's files (`names`, with / between folders) that loading one component reads: configs, texts
    of tokenizers, and its weights once; `folder` "" is the repository itself.

    Raises:
        ValueError: its weights are only pickled.
    """
    start = f"{folder}/" if folder else ""
    inside = {name.removeprefix(start) for name in names if name.startswith(start)}
    inside = {name for name in inside if "/" not in name}
    weights = _one_copy({name for name in inside if name.endswith(".safetensors")}, variant)
    pickled = sorted(name for name in inside if name.endswith(_PICKLES))
    if pickled and not weights:
        raise ValueError(
            f"{folder or 'the repository'} holds only pickled weights ({pickled[0]}), which are never loaded"
        )
    texts = {name for name in inside if name.endswith(_TEXTS) and _is_wanted(name, weights, variant)}
    return {start + name for name in (*weights, *texts)}


def refuse_quantised(folder: Path) -> None:
    """Raises ValueError, with the method, where a component's config.json says that its weights are quantised."""
    path = folder / "config.json"
    refuse_quantised_entries(folder, json_object(path) if path.is_file() else {})


def refuse_quantised_entries(folder: Path, entries: Mapping[str, object]) -> None:
    """The same, of a config.json that was read."""
    method = entries.get("quantization_config")
    if isinstance(method, Mapping):
        kind = cast(Mapping[str, object], method).get("quant_method", "an unknown method")
        raise ValueError(f"{folder}: the weights are quantised ({kind}), which cannot be read; take the original ones")


def _one_copy(weights: set[str], variant: str | None) -> set[str]:
    """The files of one copy of the weights: of the variant where there is one, under diffusers' or transformers' name
    where there are several, in shards where they come both ways."""
    found = {name: match for name in weights if (match := _WEIGHTS.fullmatch(name)) is not None}
    kept = {name for name, match in found.items() if match["variant"] == variant}
    kept = kept or {name for name, match in found.items() if match["variant"] is None}
    stems = {match["stem"] for name, match in found.items() if name in kept}
    stem = next((each for each in _STEMS if each in stems), None)
    kept = {name for name in kept if stem is None or found[name]["stem"] == stem}
    sharded = {name for name in kept if "-of-" in name}
    return sharded or kept or weights


def _is_wanted(name: str, weights: set[str], variant: str | None) -> bool:
    """Whether a text is not the index of another copy of the weights."""
    index = _INDEX.fullmatch(name)
    if index is None:
        return not name.endswith(".index.json")
    stems = {match["stem"]: match["variant"] for each in weights if (match := _WEIGHTS.fullmatch(each)) is not None}
    return index["stem"] in stems and _variant(index) == stems[index["stem"]]


def _variant(index: re.Match[str]) -> str | None:
    return index["last"] or index["middle"] or index["first"]
