"""Command lines that must be refused."""

from pathlib import Path


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
