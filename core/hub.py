"""The Hugging Face Hub: repositories by their ids ("owner/name"), and local copies of what is wanted of them."""

import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

_FILES = (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".pth", ".bin", ".json")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What one commit of a repository holds: the bytes of each file by its name."""

    repository: str
    commit: str
    sizes: Mapping[str, int]
    token: str | None

    @property
    def names(self) -> frozenset[str]:
        """All files."""
        return frozenset(self.sizes)

    def peek(self, name: str) -> Path:
        """The local copy of one small file, which is downloaded without a word."""
        return self._download([name]) / name

    def fetch(self, names: Collection[str]) -> Path:
        """The folder of the local copy, with these files at least. What is absent is downloaded, after its size was
        told on the standard error output."""
        absent = [name for name in names if not self._is_here(name)]
        if absent:
            size = sum(self.sizes[name] for name in absent)
            print(f"downloading {self.repository}: {len(absent)} files, {size / 1e9:.2f} GB", file=sys.stderr)
        return self._download(sorted(names))

    def _is_here(self, name: str) -> bool:
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(self.repository, name, revision=self.commit), str)

    def _download(self, names: list[str]) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError

        try:
            folder = snapshot_download(self.repository, revision=self.commit, token=self.token, allow_patterns=names)
        except HfHubHTTPError as error:
            raise _refused(self.repository, error) from error
        return Path(folder)


def is_hub_id(source: object) -> bool:
    """Whether a source may be the id of a repository: a string "owner/name" without the ending of a file."""
    if not isinstance(source, str) or Path(source).suffix.lower() in _FILES:
        return False
    return _HUB_ID.fullmatch(source) is not None


def hub_folder(
    repository: str,
    select: Callable[[Listing], Collection[str]],
    *,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
) -> Path:
    """The folder of a repository's local copy, with the files that `select` picks. Where the hub cannot be reached, or
    must not be, it is what was downloaded before.

    Raises:
        FileNotFoundError: nothing was downloaded before. ValueError: the hub refuses, or `select` does.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    if local_files_only:
        return _local_copy(repository, revision, "local_files_only is set")
    try:
        info = HfApi(token=token).model_info(repository, revision=revision, files_metadata=True)
    except HfHubHTTPError as error:
        raise _refused(repository, error) from error
    except Exception as error:  # every version of the client has its own errors for a network that is not there
        return _local_copy(repository, revision, f"the hub cannot be reached ({type(error).__name__})")
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    listing = Listing(repository=info.id, commit=str(info.sha), sizes=sizes, token=token)
    return listing.fetch(select(listing))


def _local_copy(repository: str, revision: str | None, why: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{repository!r} is not downloaded yet, and {why}; nor is there a file or folder of that name"
        ) from error


def _refused(repository: str, error: Exception) -> ValueError:
    reason = str(error).strip().splitlines()[0]
    return ValueError(f"cannot load {repository!r} from the Hugging Face Hub: {reason}")
