"""Imports go one way, and the model's folder stands alone: it travels with every checkpoint."""

import ast
import re
from pathlib import Path

import pytest

import leanqkv

ROOT = Path(leanqkv.__file__).parent
# Each may import those before it.
LAYERS = (
    "startup",
    "errors",
    "ranges",
    "files",
    "records",
    "job",
    "compat",
    "environment",
    "workers",
    "model",
    "cache_bits",
    "memory",
    "auto_classes",
    "presets",
    "checkpoints",
    "data",
    "eliminate",
    "convert",
    "evaluate",
    "train",
    "inference",
    "frontier",
    "compare",
    "report",
    "progress",
    "inspect",
    "commands",
    "cli",
    "__main__",
)
FILES = sorted(file for file in ROOT.rglob("*.py") if file != ROOT / "__init__.py")


def imports(file: Path) -> set[str]:
    """The parts of the package that a file imports, as first names below the root."""
    found = set()
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = (*base, *(node.module or "").split("."))
            names = target if target != ("",) else tuple(alias.name for alias in node.names)
            found.add(next(filter(None, names)))
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        module = node.module if isinstance(node, ast.ImportFrom) and not node.level else None
        assert not any(name and name.startswith("leanqkv") for name in (*names, module)), f"absolute import in {file}"
    return found - {"__version__"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_one_way(file):
    own = file.relative_to(ROOT).parts[0].removesuffix(".py")
    for name in imports(file):
        assert LAYERS.index(name) <= LAYERS.index(own), f"{own} imports {name}, which comes after it"


def test_the_model_folder_is_flat_and_imports_nothing_else_of_the_package():
    assert not [path for path in (ROOT / "model").iterdir() if path.is_dir() and path.name != "__pycache__"]
    for file in (ROOT / "model").glob("*.py"):
        assert imports(file) <= {"model"}, f"{file.name} would not load from a checkpoint"


def test_model_classes_import_only_siblings():
    """`from .x import y`, the one form that transformers copies along."""
    for file in (ROOT / "model").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1, file.name
                assert node.module, file.name
                assert "." not in node.module, file.name


# Files that hold the options of other programs, or print a table of commands to be typed.
WITH_OPTIONS = {"environment.py", "inspect.py", "inference/vllm_engine.py"}
COMMAND = re.compile(r"leanqkv \w+ |python -m experiments|torchrun --|llama-gguf-split --|var\(--")


def test_the_library_names_parameters_and_no_options():
    """The command line shows them as options; a whole command may stand in a string."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = {}
    for file in FILES:
        name, tree = str(file.relative_to(ROOT)), ast.parse(file.read_text())
        if name.startswith(("commands/", "cli.py", "__main__.py")) or name in WITH_OPTIONS:
            continue
        documented = [ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, owners)]
        strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        found[name] = [
            text
            for text in strings
            if isinstance(text, str) and text not in documented and re.search(r"(?<![\w-])--[a-z]", text)
            if not COMMAND.search(text)
        ]
    assert {name: texts for name, texts in found.items() if texts} == {}
