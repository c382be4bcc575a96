"""What a pipeline was loaded from, as far as saving it needs to know: what its files say beside the weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..core.checkpoint import Files
from ..core.saving import Saveable
from ..denoisers.experts import Experts
from ..encoders.origin import settings_of
from .folders import CONFIG, INDEX, NAME, SCHEDULER_CONFIG, entries_of
from .parts import Layout, Parts

if TYPE_CHECKING:
    from .image import ImagePipeline


class SchedulerConfig(Protocol):
    """A scheduler's options."""

    def entries(self) -> Mapping[str, Any]:
        """Those of a scheduler_config.json."""
        ...


@runtime_checkable
class ScheduledFamily(Protocol):
    """A family with the scheduler of its checkpoint."""

    @property
    def scheduler(self) -> SchedulerConfig:
        """The scheduler's options."""
        ...


@runtime_checkable
class IndexedFamily(Protocol):
    """A family whose model_index.json says which kind of model it is."""

    def index(self) -> Mapping[str, Any]:
        """These entries, the pipeline's class among them."""
        ...


@runtime_checkable
class ConfiguredFamily(Protocol):
    """A family with options in files of their own."""

    def configs(self) -> Mapping[str, Mapping[str, Any]]:
        """The entries of each of its layout's `configs`."""
        ...


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """The entries of a component's config.json, and the config that was made of them."""

    entries: Mapping[str, Any]
    config: object


@dataclass(frozen=True, kw_only=True, eq=False)
class Origin:
    """`index` and `scheduler` are the entries of model_index.json and of scheduler_config.json, or what stands for them
    where there were none. `configs` are those of components, `options` those of its layout's `configs`, `files` the
    names of single files by component, `weights` what holds the weights of each. `chosen` are the choices of the
    pipeline, and `settings` how each encoder reads prompts, by role, both as files made them."""

    layout: Layout
    index: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    configs: Mapping[str, ConfigFile]
    options: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, str]
    weights: Mapping[str, Files]
    chosen: Mapping[str, object]
    settings: Mapping[str, Mapping[str, object]]


def origin_of(pipe: "ImagePipeline", layout: Layout, parts: Parts) -> Origin:
    """The origin of a pipeline that has just been loaded."""
    family = pipe.family
    index = family.index() if isinstance(family, IndexedFamily) else {"_class_name": layout.classes[0]}
    if parts.folder is not None:
        index = entries_of(parts.folder / INDEX)
    if pipe.masking is not None and layout.inpainting is not None:  # diffusers' other classes would not load it
        index = {**index, "_class_name": layout.inpainting}
    components: dict[str, tuple[object, object]] = {
        name: (parts.others.get(name, parts.denoiser), each) for name, each in denoisers(pipe, layout).items()
    }
    components[layout.vae] = (parts.vae, pipe.vae)
    return Origin(
        layout=layout,
        index={NAME: "/".join(Path(parts.name).parts[-3:]), **index},
        scheduler=_scheduler(family, parts),
        configs={
            name: ConfigFile(entries=entries_of(part / CONFIG), config=component.config)
            for name, (part, component) in components.items()
            if isinstance(part, Path) and part.is_dir() and isinstance(component, Saveable)
        },
        options={name: _options(family, parts, layout, name) for name in layout.configs},
        files={name: part.name for name, (part, _) in components.items() if isinstance(part, Path) and part.is_file()},
        weights=parts.weights(layout),
        chosen=chosen(pipe),
        settings={role: settings_of(encoder) for role, encoder in pipe.encoders.items()},
    )


def denoisers(pipe: "ImagePipeline", layout: Layout) -> dict[str, object]:
    """The pipeline's denoiser by its folder, or both where two share its runs."""
    if isinstance(pipe.denoiser, Experts) and layout.second is not None:
        return {layout.denoiser: pipe.denoiser.high, layout.second: pipe.denoiser.low}
    return {layout.denoiser: pipe.denoiser}


def chosen(pipe: "ImagePipeline") -> dict[str, object]:
    """The choices of a pipeline that its files make, by the names of its fields."""
    return {
        "family": pipe.family,
        "recipe": pipe.recipe,
        "ends": pipe.ends,
        "editing": pipe.editing,
        "masking": pipe.masking,
        "looking": pipe.looking,
        "boundary": pipe.denoiser.boundary if isinstance(pipe.denoiser, Experts) else None,
        "preview_projection": pipe.preview_projection is None,
    }


def _options(family: object, parts: Parts, layout: Layout, name: str) -> Mapping[str, Any]:
    """A file's entries, or the family's own."""
    found = parts.config_entries(name, layout)
    if found is not None:
        return found
    return family.configs()[name] if isinstance(family, ConfiguredFamily) else {}


def _scheduler(family: object, parts: Parts) -> Mapping[str, Any]:
    """The file's entries where they say all that the scheduler is, else its own."""
    if not isinstance(family, ScheduledFamily):
        return {}
    own = family.scheduler.entries()
    file = {} if parts.scheduler is None else entries_of(parts.scheduler / SCHEDULER_CONFIG)
    return file if all(name in file and file[name] == value for name, value in own.items()) else own
