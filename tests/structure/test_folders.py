"""The lists of the folders that make up the package agree."""

import ast
import re

from repository import FOLDERS, ROOT, parsed


def test_setup_lists_the_same_folders():
    (assigned,) = (
        node.value
        for node in parsed("setup.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROOTS"
    )
    assert sorted(ast.literal_eval(assigned)) == sorted(FOLDERS)


def test_the_type_check_copies_the_same_folders():
    (listed,) = re.findall(r"^for folder in ([\w ]+); do$", (ROOT / ".ci" / "types").read_text(encoding="utf-8"), re.M)
    assert sorted(listed.split()) == sorted(FOLDERS)


def test_every_listed_folder_is_there():
    assert [name for name in FOLDERS if not (ROOT / name / "__init__.py").is_file()] == []
