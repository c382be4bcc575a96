"""Where sources lie: paths on this machine, or ids of repositories on the Hugging Face Hub, which are downloaded."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..core.component_files import component_files
from ..core.hub import Listing, hub_folder, is_hub_id
from ..core.json_file import json_object
from .folders import CONFIG, INDEX
from .parts import Layout
from .variants import check_variants

Components: TypeAlias = Callable[[Layout], Collection[str]]
"""Which components of a repository in diffusers' layout are wanted."""
SINGLE = (".safetensors", ".sft", ".gguf")
"""How the names of single files end."""


@dataclass(frozen=True, kw_only=True)
class Finder:
    """How ids are looked up. `variant` picks files where there are several; `revision` is that of this one source."""

    revision: str | None = None
    variant: str | None = None
    token: str | None = None
    local_files_only: bool = False

    def find(self, source: str | Path, components: Components, *, whole: bool = False) -> Path:
        """A file or folder, or the local copy of a repository with some of its components; where it is of one component
        alone, of that, unless it must be `whole`.

        Raises:
            FileNotFoundError: nothing of that name. ValueError: the repository holds nothing that can be used, or there
            is a revision of a path.
        """
        try:
            path = Path(source).expanduser()
            found = path.exists()
        except (OSError, RuntimeError) as error:  # a name that is too long, a user's home that is not there
            raise FileNotFoundError(f"no file or folder {str(source)!r}: {error}") from error
        if found and self.revision is not None:
            raise ValueError(f"revision: {str(source)!r} does not use this argument; it is not on the hub, but here")
        if found:
            return path
        if isinstance(source, Path) and is_hub_id(source.as_posix()):
            told = f"{source.as_posix()!r}, a string"
            raise FileNotFoundError(f"no file or folder {str(source)!r}; if a hub id is meant, give {told}")
        if not isinstance(source, str) or not is_hub_id(source):
            raise FileNotFoundError(f"no file or folder {str(source)!r}, and it is not a hub id such as 'owner/name'")
        return hub_folder(
            source,
            lambda listing: self._wanted(listing, components, whole),
            revision=self.revision,
            token=self.token,
            local_files_only=self.local_files_only,
        )

    def _wanted(self, listing: Listing, components: Components, whole: bool) -> set[str]:
        if INDEX in listing.names:
            wanted = self._of_components(listing, components)
            if whole and self.variant is not None and not any(f".{self.variant}" in name for name in wanted):
                raise ValueError(f"{listing.repository!r} has no variant {self.variant!r} of its weights")
            return wanted
        if CONFIG in listing.names and not whole:
            return component_files(listing.names, "", self.variant)
        found = sorted(name for name in listing.names if name.endswith(SINGLE))
        what = f"; it holds {', '.join(found[:4])}: download a file and give its path" if found else ""
        raise ValueError(f"{listing.repository!r} is no model in diffusers' layout (it has no {INDEX}){what}")

    def _of_components(self, listing: Listing, components: Components) -> set[str]:
        from .families import family_of_class, titles  # which import every denoiser
        from .other_classes import needs

        name = json_object(listing.peek(INDEX)).get("_class_name")
        family = family_of_class(str(name))
        if family is None:
            what = f"of diffusers' {name}{needs(str(name))}"
            raise ValueError(f"cannot load {listing.repository!r}, {what}; supported are {titles()}")
        wanted = {INDEX}
        for component in components(family.layout):
            files = component_files(listing.names, component, self.variant)
            if not files and component not in family.layout.may_lack:
                raise ValueError(
                    f"{listing.repository!r} has no folder {component!r}, a part that {family.title} needs"
                )
            inside = (name.removeprefix(f"{component}/") for name in files)
            check_variants(f"folder {component!r} of {listing.repository!r}", inside, self.variant)
            wanted |= files
        return wanted
