"""A Hugging Face Hub of one repository."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


class Hub:
    """A hub with one repository, of which `cached` files are here already."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, int]) -> None:
        import huggingface_hub

        self.files, self.folder, self.cached, self.asked = files, folder, set[str](), list[Any]()
        self.error: Exception | None = None
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda token: SimpleNamespace(model_info=self.model_info))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", self.try_to_load_from_cache)

    def model_info(self, repository: str, *, revision: str | None, files_metadata: bool) -> SimpleNamespace:
        assert files_metadata
        if self.error is not None:
            raise self.error
        siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in self.files.items()]
        return SimpleNamespace(id=repository, sha="c0ffee", siblings=siblings)

    def try_to_load_from_cache(self, repository: str, name: str, *, revision: str) -> str | None:
        assert revision == "c0ffee"
        return str(self.folder / name) if name in self.cached else None

    def snapshot_download(self, repository: str, **options: Any) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        self.asked.append(options)
        if options.get("local_files_only") and not self.cached:
            raise LocalEntryNotFoundError("nothing")
        return str(self.folder)
