"""Command lines that must be refused."""

from pathlib import Path

import yaml


def state(folder: Path) -> dict[str, bytes | None]:
    """Every file and directory, hidden ones too."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def refused(cli, folder: Path, arguments: list[str]) -> str:
    """The line with which a command refuses; it has changed nothing."""
    before = state(folder)
    code, out, err = cli(*arguments)
    assert code == 2, (code, out, err)
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    assert state(folder) == before
    return err


def table(name: str) -> list[tuple]:
    """The rows of a table in refusals/, lists in them as tuples."""
    rows = yaml.safe_load((Path(__file__).parent / "refusals" / f"{name}.yaml").read_text())
    return [tuple(tuple(part) if isinstance(part, list) else part for part in row) for row in rows]
