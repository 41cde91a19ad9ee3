"""Which file of the package imports which."""

import ast
from collections.abc import Iterator
from pathlib import Path

import leanqkv

ROOT = Path(leanqkv.__file__).parent


def import_graph() -> dict[str, object]:
    """Return which room of the package imports which, and the circles of files."""
    imports = {file: set(_imported(file)) for file in sorted(ROOT.rglob("*.py"))}
    rooms = {(_room(file), _room(other)) for file, others in imports.items() for other in others}
    reached = {file: _reached(file, imports) for file in imports}
    circles = {tuple(sorted(_name(other) for other in reached[file] if file in reached[other])) for file in imports}
    return {
        "rooms": [f"{one} -> {other}" for one, other in sorted(rooms) if one != other],
        "circles": [list(circle) for circle in sorted(circles) if circle],
    }


def _imported(file: Path) -> Iterator[Path]:
    """Yield the files that a file imports, those inside functions too; imports for type checkers do not count."""
    nodes = [ast.parse(file.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and node.level:
            base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for alias in node.names:
                places = (base / f"{alias.name}.py", base / alias.name / "__init__.py")
                yield next(path for path in (*places, base.with_suffix(".py"), base / "__init__.py") if path.exists())


def _reached(file: Path, imports: dict[Path, set[Path]]) -> set[Path]:
    found: set[Path] = set()
    pending = list(imports[file])
    while pending:
        if (other := pending.pop()) not in found:
            found.add(other)
            pending += imports[other]
    return found


def _name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def _room(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")
