"""Imports go one way, heavy packages stay inside functions, and `import calotype` is light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from repository import FOLDERS, installed_name, package_files, parsed

# Which folders each may import, besides itself. `plate` holds files; `plate/training` stands on top of everything.
MAY_IMPORT = {
    "core": set[str](),
    "schedulers": set[str](),
    "vae": {"core"},
    "language": {"core"},
    "lora": {"core"},
    "denoisers": {"core", "schedulers"},
    "encoders": {"core", "language"},
    "controlnet": {"core", "denoisers"},
    "pipelines": {"encoders", "denoisers", "controlnet", "lora", "vae", "schedulers", "language", "core", "plate"},
    "plate": set[str](),
    "plate/training": {*FOLDERS} - {"controlnet", "lora"},
    "calotype": {*FOLDERS},
}
EVERYWHERE = {"torch"}
ALSO_AT_THE_TOP = {
    "core": {"safetensors"},
    "pipelines": {"numpy"},
    "plate/training": {"numpy", "safetensors", "PIL"},
}
ONLY_IN_FUNCTIONS = {
    "core": {"triton", "flash_attn", "xformers", "huggingface_hub"},
    "encoders": {"PIL", "transformers"},
    "denoisers": {"diffusers"},
    "vae": {"diffusers"},
    "language": {"tokenizers", "transformers", "jinja2", "llguidance"},
    "pipelines": {"PIL", "numpy", "safetensors", "tqdm", "huggingface_hub", "diffusers", "av"},
    "plate/training": {"tokenizers"},
    "calotype": {"PIL"},
}
HEAVY = (
    "diffusers",
    "transformers",
    "triton",
    "PIL",
    "imageio",
    "av",
    "tokenizers",
    "tqdm",
    "huggingface_hub",
    "llguidance",
)
SECONDS = 0.3


@dataclass(frozen=True, kw_only=True)
class Import:
    """`folder` of the package (None: from outside it), the outside `package`, and whether a function must be called
    for it to happen."""

    folder: str | None
    package: str | None
    in_function: bool


@pytest.mark.parametrize("name", package_files())
def test_directions(name: str) -> None:
    folder = folder_of(name)
    found = {each.folder for each in imports(name)} - {None, folder}
    assert found <= MAY_IMPORT[folder], f"{name} imports {sorted(found - MAY_IMPORT[folder])}"


@pytest.mark.parametrize("name", package_files())
def test_heavy_packages_are_imported_in_functions(name: str) -> None:
    folder = folder_of(name)
    at_the_top = EVERYWHERE | ALSO_AT_THE_TOP.get(folder, set())
    for each in imports(name):
        if each.package is None or each.package in sys.stdlib_module_names:
            continue
        allowed = at_the_top | (ONLY_IN_FUNCTIONS.get(folder, set()) if each.in_function else set())
        assert each.package in allowed, f"{name} imports {each.package}; in_function={each.in_function}"


def test_the_rules_tell_right_from_wrong() -> None:
    tree = ast.parse("import numpy\nfrom ..core.x import y\ndef f():\n    from PIL import Image\n    import a.b")
    assert list(imports_in(tree, ("calotype", "vae"))) == [
        Import(folder=None, package="numpy", in_function=False),
        Import(folder="core", package=None, in_function=False),
        Import(folder=None, package="PIL", in_function=True),
        Import(folder=None, package="a", in_function=True),
    ]
    tree = ast.parse("from . import x\nfrom .. import plate\nfrom ...vae import y\nfrom .training import z")
    found = [each.folder for each in imports_in(tree, ("calotype", "pipelines"))]
    assert found == ["pipelines", "plate", "outside", "pipelines"]
    tree = ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import PIL")
    assert [each.package for each in imports_in(tree, ("calotype", "core"))] == ["typing"]


def folder_of(name: str) -> str:
    """The key of `MAY_IMPORT` that a file falls under."""
    if name.startswith("plate/training/"):
        return "plate/training"
    return "calotype" if name.startswith("src/") else name.split("/")[0]


def imports(name: str) -> Iterator[Import]:
    """Every import of a file that happens when it runs."""
    return imports_in(parsed(name), tuple(installed_name(name).split("/")[:-1]))


def imports_in(node: ast.AST, package: tuple[str, ...], in_function: bool = False) -> Iterator[Import]:
    """Every import below a node of a module in `package`, but for those only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(folder=None, package=alias.name.split(".")[0], in_function=in_function)
        elif isinstance(child, ast.ImportFrom):
            yield from _from(child, package, in_function)
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports_in(child, package, in_function or is_function)


def _from(node: ast.ImportFrom, package: tuple[str, ...], in_function: bool) -> Iterator[Import]:
    if node.level == 0:
        yield Import(folder=None, package=(node.module or "").split(".")[0], in_function=in_function)
        return
    start = package[: len(package) - node.level + 1]
    for alias in node.names:
        path = (*start, *(node.module.split(".") if node.module else (alias.name,)))
        inside = path[0] == "calotype" and len(path) > 1
        folder = "outside" if not inside else path[1] if path[1] in FOLDERS else "calotype"
        training = path[1:3] == ("plate", "training")
        yield Import(folder="plate/training" if training else folder, package=None, in_function=in_function)
        if node.module:
            return


@pytest.fixture(scope="module")
def light_imports() -> list[tuple[float, set[str]]]:
    """Seconds of processor time that `import calotype` takes after torch, and what it brings, in fresh processes."""
    code = f"""
import sys
sys.path[:0] = {[path for path in sys.path if path]!r}
import torch, time
before, start = set(sys.modules), time.process_time()
import calotype
print(time.process_time() - start, *(set(sys.modules) - before))
"""
    runs: list[tuple[float, set[str]]] = []
    while len(runs) < 3 and not (runs and runs[-1][0] < SECONDS):
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
        seconds, *modules = done.stdout.split()
        runs.append((float(seconds), set(modules)))
    return runs


def test_import_is_quick(light_imports: list[tuple[float, set[str]]]) -> None:
    assert min(seconds for seconds, _ in light_imports) < SECONDS


def test_import_brings_nothing_heavy(light_imports: list[tuple[float, set[str]]]) -> None:
    for _, modules in light_imports:
        assert "calotype" in modules
        assert not {module.split(".")[0] for module in modules} & set(HEAVY)
        assert {module for module in modules if module.startswith("calotype.")} == {"calotype._version"}


def test_the_bundled_model_brings_no_other_family() -> None:
    code = "import sys, calotype; calotype.load(); print('calotype.pipelines.families' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False"
