"""Config files: JSON objects on disk."""

import json
from pathlib import Path
from typing import Any, cast


def json_object(path: Path) -> dict[str, Any]:
    """The entries of a file that is there.

    Raises:
        ValueError: it cannot be read, or holds no JSON object.
    """
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path}: not a config file: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a config file: it holds no JSON object")
    return cast(dict[str, Any], found)
