"""Corpora: where documents come from, and a hash that identifies their content."""

import bz2
import codecs
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, BinaryIO, cast

from ..errors import LeanError, UnreachableError, first_line, needs
from ..files import hash_files, looks_like_path
from .cache import file_state, remembered

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".java", ".rs", ".go", ".tex")
OPEN: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
# A record a line, as C4 and Dolma have it under `.json.gz`.
JSONL = (".jsonl", ".ndjson")
JSONL_SUFFIXES = (*JSONL, *(f"{kind}{packed}" for packed in OPEN for kind in (*JSONL, ".json")))
# What is read of a folder, and what may be data that is not: a folder's description counts it.
READ = (*TEXT_SUFFIXES, *(f"{kind}{packed}" for packed in OPEN for kind in TEXT_SUFFIXES), *JSONL_SUFFIXES, ".parquet")
TABLES = tuple(f"{kind}{packed}" for packed in ("", *OPEN) for kind in (".csv", ".tsv"))
UNREAD = (*TABLES, ".json", ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".arrow", ".pdf", ".html")
BUILT_IN = ("stdlib", "prose")
# Corpora that the papers and others train on, and where the hub has them.
HUB_NAMES = {
    "fineweb-edu": "HuggingFaceFW/fineweb-edu",
    "openwebtext": "Skylion007/openwebtext",
    "slimpajama": "cerebras/SlimPajama-627B",
}
# How files begin that are no UTF-8 text, what they are, and what to do about it.
CONVERT, UNPACK = "save it as UTF-8 (iconv -t UTF-8 -f", "unpack it first"
FOREIGN = {
    **dict.fromkeys((b"\xff\xfe\0\0", b"\0\0\xfe\xff"), ("UTF-32 text", f"{CONVERT} UTF-32)")),
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), ("UTF-16 text", f"{CONVERT} UTF-16)")),
    b"\x28\xb5\x2f\xfd": ("a Zstandard file", "unpack it first (zstd -d)"),
    b"\x1f\x8b": ("a gzip file", "give its name the ending .gz"),
    b"\xfd7zXZ\0": ("an xz file", "give its name the ending .xz"),
    b"BZh": ("a bzip2 file", "give its name the ending .bz2"),
    **dict.fromkeys((b"PK\3\4", b"PK\5\6"), ("a zip archive", UNPACK)),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", UNPACK),
    b"Rar!\x1a\x07": ("a rar archive", UNPACK),
    b"\x04\x22\x4d\x18": ("an lz4 file", UNPACK),
    b"PAR1": ("a Parquet file", "give its name the ending .parquet"),
    **dict.fromkeys((b"ARROW1", b"\xff\xff\xff\xff"), ("an Arrow file", "write its text as JSONL or Parquet")),
    b"%PDF": ("a PDF", "extract its text first"),
}
# A file longer than this is read in pieces cut at line ends, so that no document has to fit into memory whole.
PIECE_CHARACTERS = 2**20


@dataclass(frozen=True)
class Corpus:
    """A stream of documents.

    Attributes:
        description: the data, as a report names it.
        fingerprint: hex digest; equal for equal content in equal order (of a hub dataset: for its name and revision).
        parts: of each file of it what makes a fresh iterator over its documents, each a str.
    """

    description: str
    fingerprint: str
    parts: Sequence[Callable[[], Iterator[str]]]

    def documents(self) -> Iterator[str]:
        """Return a fresh iterator over all documents."""
        return (document for part in self.parts for document in part())


def open_corpus(source: str | None, text_field: str = "text") -> Corpus:
    """Return the corpus that `source` names.

    Args:
        source: None or "stdlib" for the Python source of this interpreter's standard library; "prose" for English text
            from the documentation of Python and of packages; a text, JSONL or Parquet file, or a folder of them, the
            first two also as `.gz`, `.xz` or `.bz2`; else the name of a Hugging Face dataset, `NAME`, `OWNER/NAME` or
            `NAME:CONFIG`; `fineweb-edu`, `openwebtext` and `slimpajama` are short for their repositories. A `.json`
            file is read as JSONL where it is named itself, and left out of a folder, where it may be a configuration.
        text_field: the field of JSONL records, Parquet files and datasets that holds the text.

    Raises:
        LeanError: nothing there, empty, not text, or a dataset that cannot be reached.
    """
    if source is None or source == "stdlib":
        return _standard_library()
    if source == "prose":
        return _prose()
    if not source:
        raise LeanError("the name of the data is empty; give a file, a folder or a dataset")
    path = Path(source)
    if path.exists():
        return _local_files(path, text_field)
    if looks_like_path(source) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source):
        raise LeanError(f"no data at {source}: there is no such file or folder{_nearest(source)}")
    return _hub_dataset(source, text_field)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn what the operating system says about `file` while the body reads it into one line that names it."""
    try:
        yield
    except OSError as error:
        raise LeanError(f"{file} cannot be read: {error.strerror or first_line(error)}") from None
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise LeanError(f"{file} is cut off or damaged: {first_line(error)}") from None


def encodable(text: str, place: str) -> str:
    """Return `text` if UTF-8 can express it: half of a surrogate pair is no character.

    Raises:
        LeanError: it cannot; `place` says whose text that is.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LeanError(
            f"{place} is no UTF-8 text: {text[error.start]!r} at character {error.start + 1:,} is half of a character"
        ) from None
    return text


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}
    files = [path for path in sorted(root.rglob("*.py")) if not installed & {*path.parts} and _is_utf8(path)]
    if not files:
        raise LeanError(f"this interpreter has no standard library source at {root}; give `data`")
    # With their byte order marks, which some files of its tests have: the tokens of every run on it were made so.
    return _files_corpus("Python standard library source", root, files, "text", "utf-8")


def _prose() -> Corpus:
    from .prose import prose

    made = prose()
    size, digest = f"{made['bytes'] / 1e6:.1f} MB", made["sha256"]
    description = f"English prose from Python's documentation, {size}, sha256 {digest[:12]}"
    return Corpus(description, digest, [partial(_read_jsonl, made["file"], "text")])


def _nearest(source: str) -> str:
    """The tail of an error message: names like `source`, of files beside where it would be and of built-in data."""
    beside: list[str] = []
    with suppress(OSError):
        beside = sorted(map(str, Path(source).parent.iterdir()))
    near = get_close_matches(source, [*beside, *BUILT_IN], n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def _is_utf8(path: Path) -> bool:
    # The library's tests contain files in other encodings on purpose.
    with suppress(UnicodeDecodeError, OSError):
        path.read_text(encoding="utf-8")
        return True
    return False


def _local_files(path: Path, text_field: str) -> Corpus:
    if path.is_file():
        if _ends_in(path, TABLES):
            raise LeanError(f"{path} is a table; write its text as JSONL or Parquet")
        return _files_corpus(path.name, path.parent, [path], text_field)
    there = [file for file in sorted(path.rglob("*")) if file.is_file()]
    files = [file for file in there if _ends_in(file, READ)]
    others = Counter(file.suffix.lower() for file in there if _ends_in(file, UNREAD) and not _ends_in(file, READ))
    counts = ", ".join(f"{count} {suffix}" for suffix, count in sorted(others.items()))
    unread = f"; not read: {counts}" if counts else ""
    if not files:
        shown = " ".join((*TEXT_SUFFIXES, *JSONL_SUFFIXES[:2], ".parquet"))
        advice = ". Unpack archives first" if counts else ""
        raise LeanError(
            f"no text in {path}: looked for files ending in {shown}, or {' '.join(OPEN)} behind it{unread}{advice}"
        )
    return _files_corpus(f"{path.name or path} ({len(files)} files{unread})", path, files, text_field)


def _ends_in(file: Path, suffixes: tuple[str, ...]) -> bool:
    return file.name.lower().endswith(suffixes)


def _files_corpus(
    description: str, root: Path, files: Sequence[Path], text_field: str, encoding: str = "utf-8-sig"
) -> Corpus:
    digest = hashlib.sha256(text_field.encode())
    size, parts = 0, []
    for file in files:
        with reading(file):
            state = file_state(file)
            content = remembered([file], "sha256", str, partial(hash_files, file))
            size += state[0]
            if encoding == "utf-8-sig" and _beginning(file).startswith(codecs.BOM_UTF8):
                content += " without its mark"  # tokens made before it was dropped are another text's
        digest.update(b"\0" + os.fsencode(file.relative_to(root)) + b"\0" + content.encode())
        parts.append(partial(_documents, file, text_field, state, encoding))
    if not size:
        raise LeanError(f"the data is empty: {description} in {root} has no bytes")
    shown = os.fsencode(description).decode(errors="backslashreplace")  # a file's name may be no UTF-8
    return Corpus(f"{shown}, {size / 1e6:.1f} MB", digest.hexdigest(), parts)


def _documents(file: Path, text_field: str, state: tuple[int, int, int], encoding: str) -> Iterator[str]:
    """Yield the documents of a file, which is to stay in the state in which it was hashed."""
    if _ends_in(file, (*JSONL_SUFFIXES, ".json")):
        yield from _read_jsonl(file, text_field)
    elif file.suffix.lower() == ".parquet":
        yield from _read_parquet(file, text_field)
    else:
        yield from read_pieces(file, encoding)
    with reading(file):
        if file_state(file) != state:
            raise LeanError(f"{file} was changed while it was read; start again when it is complete")


def read_pieces(file: Path, encoding: str = "utf-8-sig") -> Iterator[str]:
    """Yield a text file in pieces of about a Mi characters, cut at line ends, without a byte order mark before it.

    Raises:
        LeanError: unreadable, or no text in UTF-8.
    """
    try:
        with reading(file), _open(file) as binary, io.TextIOWrapper(binary, encoding=encoding) as stream:
            while piece := stream.read(PIECE_CHARACTERS):
                if len(piece) == PIECE_CHARACTERS:
                    piece += stream.readline(PIECE_CHARACTERS)
                if "\0" in piece:
                    raise LeanError(_foreign(file) or f"{file} is not text: it contains NUL bytes")
                yield piece
    except UnicodeDecodeError as error:
        raise LeanError(
            _foreign(file) or f"{file} is not UTF-8 text: byte 0x{error.object[error.start]:02x} cannot be read"
        ) from None


def _open(file: Path) -> BinaryIO:
    return cast(BinaryIO, OPEN.get(file.suffix.lower(), open)(file, "rb"))


def _beginning(file: Path) -> bytes:
    with reading(file), _open(file) as stream:
        return stream.read(512)


def _foreign(file: Path) -> str | None:
    """Return what a file is that is no UTF-8 text, and what to do; None if its beginning does not say."""
    beginning = _beginning(file)
    found = next((kind for start, kind in FOREIGN.items() if beginning.startswith(start)), None)
    if beginning[257:262] == b"ustar":
        found = ("a tar archive", UNPACK)
    return None if found is None else f"{file} is {found[0]}, not UTF-8 text; {found[1]}"


def _read_jsonl(file: Path, text_field: str) -> Iterator[str]:
    with reading(file), _open(file) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                other = _foreign(file) if number == 1 else None
                raise LeanError(
                    other or f"{file} line {number} is not JSON: {error}; every line is to be a record"
                ) from None
            except RecursionError:
                raise LeanError(f"{file} line {number} cannot be read: its JSON is nested too deeply") from None
            if text := _field(record, text_field, f"{file} line {number}"):
                yield text


def _read_parquet(file: Path, text_field: str) -> Iterator[str]:
    pyarrow, parquet = needs("train", "pyarrow"), needs("train", "pyarrow.parquet")
    # Arrow, its codecs and its text raise errors of many kinds.
    damaged = (pyarrow.ArrowException, OSError, ValueError)
    try:
        table = parquet.ParquetFile(file)
    except damaged as error:
        raise LeanError(f"{file} is not a Parquet file: {first_line(error)}") from None
    schema = table.schema_arrow
    if schema.names.count(text_field) > 1:
        raise LeanError(f"{file} has several columns {text_field!r}; give one of them another name")
    if text_field not in schema.names:
        raise LeanError(f"{file} has no column {text_field!r} (found: {', '.join(schema.names)}); give `text_field`")
    kind = schema.field(text_field).type
    if not pyarrow.types.is_string(kind) and not pyarrow.types.is_large_string(kind):
        raise LeanError(f"{file}: column {text_field!r} holds {kind}, not text; give `text_field`")
    row = 0
    try:
        for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
            yield from filter(None, batch.column(0).to_pylist())
            row += len(batch)
    except damaged as error:
        raise LeanError(f"{file} is damaged behind row {row:,}: {first_line(error)}") from None


def _field(record: object, text_field: str, place: str) -> str | None:
    """Return the text of a record; None where it is null, which is a record without text."""
    if not isinstance(record, dict):
        raise LeanError(f"{place} is a {type(record).__name__}, not a record such as {{{text_field!r}: ...}}")
    if text_field not in record:
        fields = shorten(", ".join(record), 200) or "none"
        raise LeanError(f"{place} has no text in field {text_field!r} (found: {fields}); give `text_field`")
    if (text := record[text_field]) is None:
        return None
    if not isinstance(text, str):
        raise LeanError(f"{place}: field {text_field!r} holds a {type(text).__name__}, not text; give `text_field`")
    return encodable(text, place)


def _hub_dataset(source: str, text_field: str) -> Corpus:
    import huggingface_hub

    datasets = needs("train", "datasets")
    name, _, config = source.partition(":")
    if name == "redpajama":
        raise LeanError(
            "redpajama is published with a script, which the datasets library no longer runs. Give slimpajama, the "
            "same corpus without duplicates, or a folder with RedPajama's files"
        )
    name = HUB_NAMES.get(name, name)
    try:
        revision = str(huggingface_hub.dataset_info(name).sha)  # names the content, as its version does not
        stream = datasets.load_dataset(name, config or None, split="train", streaming=True, revision=revision)
    except Exception as error:  # the library raises a dozen kinds; each means that the dataset cannot be read
        raise LeanError(
            f"no data at {source}: no such file or folder, and the dataset of that name cannot be loaded "
            f"({first_line(error)}){_nearest(source)}"
        ) from None
    digest = hashlib.sha256(f"{source}\0{text_field}\0{revision}".encode())

    def part(number: int) -> Iterator[str]:
        records = stream.shard(stream.num_shards, number) if stream.num_shards > 1 else stream
        try:
            for record in records:
                if text := _field(record, text_field, source):
                    yield text
        except LeanError:
            raise
        except Exception as error:  # of a dozen libraries below
            raise UnreachableError(
                f"the dataset {source} could not be read further: {first_line(error)}. The same command goes on"
            ) from None

    parts = [partial(part, number) for number in range(stream.num_shards)]
    return Corpus(f"{source} (Hugging Face dataset, revision {revision[:12]})", digest.hexdigest(), parts)
