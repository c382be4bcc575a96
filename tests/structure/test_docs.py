"""What the documents point at is there."""

import ast
import re

import pytest
from repository import ROOT, parsed, tracked

DOCUMENTS = tuple(name for name in tracked() if name.endswith(".md"))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        path = (ROOT / name).parent / target
        assert path.exists(), f"{name}: {target}"


def test_every_test_of_the_contract_exists() -> None:
    text = (ROOT / "docs/contract.md").read_text(encoding="utf-8")
    file, count = "", 0
    for part in re.findall(r"`((?:tests/\S+\.py)?::\w+)`", text):
        path, name = part.split("::")
        file = path or file
        functions = {node.name for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef)}
        assert name in functions, part
        count += 1
    assert count > 40


def test_files_named_in_the_guide_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", text):
        assert (ROOT / path).exists(), path
