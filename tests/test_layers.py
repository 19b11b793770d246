"""The house stands as it is drawn: a module imports only what is above it, and torch stays in its rooms."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ckptspec"

# From top to bottom. What stands on one line may not import each other.
LAYERS = [
    {"errors"},
    {"format"},
    {"planner"},
    {"check"},
    {"storage"},
    {"engine"},
    {"pytorch"},
    {"integrations"},
    {"demo"},
    {"cli"},
    {"__main__"},
    {""},  # ckptspec/__init__.py, the public names
]
TORCH_ROOMS = {"pytorch", "integrations", "demo"}
PURE = {"format", "planner", "check"}
IMPURE = {"os", "pathlib", "threading", "torch", "io", "subprocess", "socket", "tempfile", "shutil"}

# The one import that points down, for a type checker alone: an error carries the report it was made from.
TYPES_ONLY = {("ckptspec.errors", "ckptspec.format.report")}

FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]


def module_of(path: Path) -> str:
    """Return the dotted name of a source file, without a trailing `__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted name of everything a file imports, wherever in it the import stands."""
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        for name in imported(node, package):
            if (module, name) not in TYPES_ONLY:
                yield name


def imported(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the names one import statement asks for: the module where it names one, else where the name is from."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        for alias in node.names:
            name = f"{base}.{alias.name}"
            yield name if name in MODULES else base


def layer(module: str) -> str:
    """Return the first part below ckptspec of a dotted name: its floor of the house."""
    return module.split(".")[1] if "." in module else ""


def height(name: str) -> int:
    """Return the row of LAYERS a floor stands on; fails for a floor nobody drew."""
    rows = [row for row, floors in enumerate(LAYERS) if name in floors]
    assert rows, f"ckptspec/{name} is not in the list of layers"
    return rows[0]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_module_imports_only_from_those_above_it(path: Path) -> None:
    mine = layer(module_of(path))
    inner = [name for name in imports(path) if name.split(".")[0] == "ckptspec"]
    if mine == "demo":
        # The demo stands where a user stands: it may use everything, the public names first.
        assert all(name in MODULES for name in inner)
        return
    wrong = [name for name in inner if layer(name) != mine and height(layer(name)) >= height(mine)]
    assert wrong == []


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_torch_is_imported_only_where_torch_lives(path: Path) -> None:
    torchy = [name for name in imports(path) if name.split(".")[0] == "torch"]
    assert torchy == [] or layer(module_of(path)) in TORCH_ROOMS


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_the_pure_layers_touch_no_machine(path: Path) -> None:
    if layer(module_of(path)) in PURE:
        assert IMPURE.isdisjoint(name.split(".")[0] for name in imports(path))


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module_of(p): {n for n in imports(p) if n in MODULES and n != module_of(p)} for p in FILES}
    # The demo and the command line reach the public names, which reach everything lazily.
    graph = {name: needs for name, needs in graph.items() if layer(name) not in {"demo", "cli", ""}}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as fault:
        pytest.fail(" -> ".join(fault.args[1]))
    assert set(graph) <= set(order)


def test_what_is_imported_for_types_alone_is_not_imported_when_it_runs() -> None:
    for module, name in TYPES_ONLY:
        script = f"import sys, {module}; sys.exit({name!r} in sys.modules)"
        assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_every_package_is_installed() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = set(re.findall(r'"(ckptspec[.\w]*)",\n', text[text.index("packages = [") :]))
    assert listed == {module_of(p) for p in FILES if p.name == "__init__.py"} | {"ckptspec_schema"}


def test_a_module_is_short_enough_to_read() -> None:
    long = {name: n for path, name in zip(FILES, NAMES, strict=True) if (n := len(path.read_text().splitlines())) > 400}
    assert long == {}


def test_the_public_names_load_neither_torch_nor_numpy() -> None:
    script = (
        "import sys, ckptspec\n"
        "assert callable(ckptspec.validate)\n"
        "heavy = sorted({'torch', 'numpy', 'ml_dtypes', 'rich'} & set(sys.modules))\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
