"""Corpora: where documents come from, and a hash that identifies their content."""

import hashlib
import json
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import LeanError

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".java", ".rs", ".go", ".tex")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
# A file longer than this is read in pieces cut at line ends, so that no document has to fit into memory whole.
PIECE_CHARACTERS = 2**20


@dataclass(frozen=True)
class Corpus:
    """A stream of documents.

    Attributes:
        description: what a report says the data is.
        fingerprint: hex digest; equal for equal content in equal order (of a hub dataset: for its name and version).
        documents: makes a fresh iterator over the documents, each a str.
    """

    description: str
    fingerprint: str
    documents: Callable[[], Iterator[str]]


def open_corpus(source: str | None, text_field: str = "text") -> Corpus:
    """The corpus that `source` names.

    Args:
        source: None or "stdlib" for the Python source of this interpreter's standard library; a text, JSONL or Parquet
            file, or a folder of them; else the name of a Hugging Face dataset, `NAME`, `OWNER/NAME` or `NAME:CONFIG`.
        text_field: the field of JSONL records, Parquet files and datasets that holds the text.

    Raises:
        LeanError: nothing there, empty, not text, or a dataset that cannot be reached.
    """
    if source is None or source == "stdlib":
        return _standard_library()
    path = Path(source)
    if path.exists():
        return _local_files(path, text_field)
    if path.suffix or source.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source):
        raise LeanError(f"no data at {source}: there is no such file or folder")
    return _hub_dataset(source, text_field)


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if "site-packages" not in path.parts and "dist-packages" not in path.parts and _is_utf8(path)
    ]
    if not files:
        raise LeanError(f"this interpreter has no standard library source at {root}; give --data")
    return _files_corpus("Python standard library source", root, files, "text")


def _is_utf8(path: Path) -> bool:
    # The library's tests contain files in other encodings on purpose.
    try:
        path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


def _local_files(path: Path, text_field: str) -> Corpus:
    if path.is_file():
        return _files_corpus(path.name, path.parent, [path], text_field)
    readable = (*TEXT_SUFFIXES, *JSONL_SUFFIXES, ".parquet")
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix.lower() in readable]
    if not files:
        raise LeanError(f"no text in {path}: looked for files ending in {' '.join(readable)}")
    return _files_corpus(f"{path.name or path} ({len(files)} files)", path, files, text_field)


def _files_corpus(description: str, root: Path, files: Sequence[Path], text_field: str) -> Corpus:
    digest = hashlib.sha256(text_field.encode())
    size = 0
    for file in files:
        digest.update(f"\0{file.relative_to(root)}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(2**20):
                digest.update(block)
                size += len(block)
    if not size:
        raise LeanError(f"the data is empty: {description} in {root} has no bytes")
    return Corpus(
        f"{description}, {size / 1e6:.1f} MB",
        digest.hexdigest(),
        lambda: (document for file in files for document in _read(file, text_field)),
    )


def _read(file: Path, text_field: str) -> Iterator[str]:
    suffix = file.suffix.lower()
    if suffix in JSONL_SUFFIXES:
        return _read_jsonl(file, text_field)
    if suffix == ".parquet":
        return _read_parquet(file, text_field)
    return _read_text(file)


def _read_text(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as stream:
            while piece := stream.read(PIECE_CHARACTERS):
                if len(piece) == PIECE_CHARACTERS:
                    piece += stream.readline(PIECE_CHARACTERS)
                if "\0" in piece:
                    raise LeanError(f"{file} is not text: it contains NUL bytes")
                yield piece
    except UnicodeDecodeError as error:
        raise LeanError(f"{file} is not UTF-8 text: byte 0x{error.object[error.start]:02x} cannot be read") from None


def _read_jsonl(file: Path, text_field: str) -> Iterator[str]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise LeanError(f"{file} line {number} is not JSON: {error}") from None
            yield _field(record, text_field, f"{file} line {number}")


def _read_parquet(file: Path, text_field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise LeanError(f"{file} is not a Parquet file: {str(error).splitlines()[0]}") from None
    if text_field not in table.schema_arrow.names:
        columns = ", ".join(table.schema_arrow.names)
        raise LeanError(f"{file} has no column {text_field!r} (found: {columns}); give --text-field")
    if (
        not pyarrow.types.is_string(kind := table.schema_arrow.field(text_field).type)
        and kind != pyarrow.large_string()
    ):
        raise LeanError(f"{file}: column {text_field!r} holds {kind}, not text; give --text-field")
    for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
        yield from (text for text in batch.column(0).to_pylist() if text)


def _field(record: object, text_field: str, where: str) -> str:
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise LeanError(f"{where} has no text in field {text_field!r} (found: {found}); give --text-field")
    return record[text_field]


def _hub_dataset(source: str, text_field: str) -> Corpus:
    import datasets

    name, _, config = source.partition(":")
    try:
        stream = datasets.load_dataset(name, config or None, split="train", streaming=True)
    except Exception as error:  # the library raises a dozen kinds; each means that the data is not to be had
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LeanError(
            f"no data at {source}: no such file or folder, and the dataset of that name cannot be loaded ({reason})"
        ) from None
    digest = hashlib.sha256(f"{source}\0{text_field}\0{stream.info.version}\0{stream.info.download_checksums}".encode())
    return Corpus(
        f"{source} (Hugging Face dataset)",
        digest.hexdigest(),
        lambda: (_field(record, text_field, source) for record in stream),
    )
