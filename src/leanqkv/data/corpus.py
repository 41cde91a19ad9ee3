"""Corpora: where documents come from, and a hash that identifies their content."""

import hashlib
import json
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import LeanError, first_line
from ..files import add_file

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".java", ".rs", ".go", ".tex")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
# A file longer than this is read in pieces cut at line ends, so that no document has to fit into memory whole.
PIECE_CHARACTERS = 2**20


@dataclass(frozen=True)
class Corpus:
    """A stream of documents.

    Attributes:
        description: the data, as a report names it.
        fingerprint: hex digest; equal for equal content in equal order (of a hub dataset: for its name and version).
        documents: makes a fresh iterator over the documents, each a str.
    """

    description: str
    fingerprint: str
    documents: Callable[[], Iterator[str]]


def open_corpus(source: str | None, text_field: str = "text") -> Corpus:
    """Return the corpus that `source` names.

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
    if looks_like_path(source) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source):
        raise LeanError(f"no data at {source}: there is no such file or folder")
    return _hub_dataset(source, text_field)


def looks_like_path(source: str) -> bool:
    """Tell a path that does not exist from the name of a Hugging Face dataset."""
    return bool(Path(source).suffix) or source.startswith((".", "/", "~"))


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
    with suppress(UnicodeDecodeError, OSError):
        path.read_text(encoding="utf-8")
        return True
    return False


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
    for file in files:
        digest.update(f"\0{file.relative_to(root)}\0".encode())
        add_file(digest, file)
    size = sum(file.stat().st_size for file in files)
    if not size:
        raise LeanError(f"the data is empty: {description} in {root} has no bytes")

    def documents() -> Iterator[str]:
        for file in files:
            suffix = file.suffix.lower()
            if suffix in JSONL_SUFFIXES:
                yield from _read_jsonl(file, text_field)
            elif suffix == ".parquet":
                yield from _read_parquet(file, text_field)
            else:
                yield from _read_text(file)

    return Corpus(f"{description}, {size / 1e6:.1f} MB", digest.hexdigest(), documents)


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
        raise LeanError(f"{file} is not a Parquet file: {first_line(error)}") from None
    schema = table.schema_arrow
    if text_field not in schema.names:
        raise LeanError(f"{file} has no column {text_field!r} (found: {', '.join(schema.names)}); give --text-field")
    kind = schema.field(text_field).type
    if not pyarrow.types.is_string(kind) and not pyarrow.types.is_large_string(kind):
        raise LeanError(f"{file}: column {text_field!r} holds {kind}, not text; give --text-field")
    for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
        yield from (text for text in batch.column(0).to_pylist() if text)


def _field(record: object, text_field: str, place: str) -> str:
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise LeanError(f"{place} has no text in field {text_field!r} (found: {fields}); give --text-field")
    return record[text_field]


def _hub_dataset(source: str, text_field: str) -> Corpus:
    import datasets

    name, _, config = source.partition(":")
    try:
        stream = datasets.load_dataset(name, config or None, split="train", streaming=True)
    except Exception as error:  # the library raises a dozen kinds; each means that the dataset cannot be read
        raise LeanError(
            f"no data at {source}: no such file or folder, and the dataset of that name cannot be loaded "
            f"({first_line(error)})"
        ) from None
    digest = hashlib.sha256(f"{source}\0{text_field}\0{stream.info.version}\0{stream.info.download_checksums}".encode())
    return Corpus(
        f"{source} (Hugging Face dataset)",
        digest.hexdigest(),
        lambda: (_field(record, text_field, source) for record in stream),
    )
