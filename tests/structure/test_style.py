"""House style that a linter does not see: lengths, state, and what has no place in a repository."""

import ast
import re
import statistics
from collections.abc import Iterator

import pytest
from repository import ROOT, package_files, parsed, python_files, tracked

FILE_LINES, FUNCTION_LINES, MEDIAN_LINES = 420, 40, 10  # "about 400", and bodies without signature and docstring
BUILDERS = ("append", "add", "update", "extend", "insert", "setdefault", "pop", "popitem", "clear", "remove", "discard")
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
# Folders of somebody's machine, and notes about work instead of the thing itself.
PRIVATE = re.compile(r"(?<![\w.)}])/(?:home|Users|work|opt|mnt)/\w|\b(?:TODO|FIXME|XXX)\b|\bissue #?\d")
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.mark.parametrize("name", python_files())
def test_files_are_short(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= FILE_LINES


def test_functions_are_short() -> None:
    lengths = {f"{name}: {each.name}": body_lines(each) for name in python_files() for each in functions(name)}
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES} == {}
    assert statistics.median(lengths.values()) < MEDIAN_LINES


def functions(name: str) -> Iterator[FunctionNode]:
    """Every function and method of a file."""
    return (node for node in ast.walk(parsed(name)) if isinstance(node, FunctionNode))


def body_lines(function: FunctionNode) -> int:
    """Lines of a function without its signature and docstring."""
    first = function.body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if not has_docstring:
        return (function.end_lineno or 0) - first.lineno + 1
    return (function.end_lineno or 0) - (first.end_lineno or 0)


@pytest.mark.parametrize("name", package_files())
def test_there_is_no_state_in_modules_and_classes(name: str) -> None:
    assert list(state_in(parsed(name))) == []


def test_state_is_seen() -> None:
    code = """
seen = []
TABLE = {}
class A:
    cache = {}
def f():
    global count
    TABLE["a"] = 1
    TABLE.update(b=2)
    local = {}
    local["x"] = 1
"""
    assert sorted(state_in(ast.parse(code))) == [
        "A.cache is shared by all objects",
        "TABLE is changed by a function",
        "TABLE is changed by a function",
        "global count",
        "seen is a list or the like that is not a CONSTANT",
    ]


def state_in(module: ast.Module) -> Iterator[str]:
    """What a module keeps between calls, in words. `functools.cache` on files that never change is not state."""
    tables = {name for name, _ in _assigned(module.body)}
    for name, value in _assigned(module.body):
        if isinstance(value, MUTABLE) and not name.startswith("__") and name != name.upper():
            yield f"{name} is a list or the like that is not a CONSTANT"
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            shared = (name for name, value in _assigned(node.body) if isinstance(value, MUTABLE))
            yield from (f"{node.name}.{name} is shared by all objects" for name in shared)
        if isinstance(node, ast.Global):
            yield f"global {', '.join(node.names)}"
        if isinstance(node, FunctionNode):
            yield from (f"{name} is changed by a function" for name in _changed(node) if name in tables)


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    for statement in body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(statement, ast.Assign | ast.AnnAssign):
                yield target.id, statement.value


def _changed(function: FunctionNode) -> Iterator[str]:
    """The names whose contents a function changes."""
    for node in ast.walk(function):
        changed: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BUILDERS:
            changed = node.func.value
        if isinstance(changed, ast.Name):
            yield changed.id


def test_pickles_are_never_read() -> None:
    pickles = {"torch.load", "torch.save", "pickle.load", "pickle.loads", "numpy.load", "np.load"}
    for name in package_files():
        used = {ast.unparse(node) for node in ast.walk(parsed(name)) if isinstance(node, ast.Attribute)}
        assert not used & pickles, name


@pytest.mark.parametrize("name", tracked())
def test_nothing_private_is_in_the_texts(name: str) -> None:
    content = (ROOT / name).read_bytes()
    if b"\0" in content or name == "tests/structure/test_style.py":
        return
    found = [match.group() for match in PRIVATE.finditer(content.decode("utf-8"))]
    assert found == [], name


INNOCENT = (("https:", "", "example.org", "home", "page"), ("runs", "work", "x"), ("{folder}", "opt", "y"))


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("see " + "/".join(("", "home", "ann", "notes")), True),
        ("'" + "/".join(("", "opt", "tool", "bin")) + "'", True),
        ("fixed in " + " ".join(("issue", "12")), True),
        ("TODO", True),
        (" and ".join("/".join(each) for each in INNOCENT), False),
        ("an issue of style", False),
    ],
)
def test_private_words_are_seen(text: str, private: bool) -> None:
    assert bool(PRIVATE.search(text)) == private
