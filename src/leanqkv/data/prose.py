"""English prose made on the spot: what Python and the packages that this one needs say about themselves."""

import ast
import json
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from typing import Any

from .cache import cached_directory

FORMAT = 1
# Packages of leanqkv and its extras, by their import names and the names they install under; missing ones are left out.
PACKAGES = {
    "numpy": "numpy",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "huggingface_hub": "huggingface_hub",
    "datasets": "datasets",
}
SKIPPED_FOLDERS = {"test", "tests", "testing", "_testing", "idle_test", "site-packages", "dist-packages"}
# A paragraph is kept if it has this many words, and this share of them are plain English words.
FEWEST_WORDS, PLAIN_SHARE = 8, 0.75
PLAIN_WORD = re.compile(r"[(\"'“]*[A-Za-z]+(['’-][A-Za-z]+)*[.,;:!?)\"'”]*")
RULE = re.compile(r"[=~^\"*-]{3,}")
TABLES = re.compile(
    r"(args|arguments|parameters|other parameters|keyword arguments|kwargs|attributes|methods|returns|return|yields|"
    r"raises|examples?|shape|see also|references)\s*:{0,2}",
    re.IGNORECASE,
)
# How doctests, tables, comments, citations, decorators and the parameters of NumPy's docstrings begin.
NOT_PROSE = re.compile(r">>>|\.\.\.|\||\+-|#|\.\. \[|@|[*\w, ]+ : ")
REST_DIRECTIVE = re.compile(r"\.\. [\w-]+:: ?")
REST_ROLE = re.compile(r":[\w:+.-]+:`~?([^`<]*?)\s*(?:<[^`]*>)?`")
REST_QUOTE = re.compile(r"`+([^`]*)`+_{0,2}")


def prose() -> dict[str, Any]:
    """Return the prose: `file`, JSONL with one document per record's `text`; its `bytes` and `sha256`.

    The documents are the topics of `help()`, then one for the docstrings of every module of the standard library, then
    the same of PACKAGES. Modules are parsed, never imported. The order is the same everywhere; the text follows the
    versions of Python and of the packages. Made on first use and read from the cache afterwards.
    """
    installed = {name: version(package) for name, package in PACKAGES.items() if find_spec(name)}
    content = json.dumps([FORMAT, sysconfig.get_path("stdlib"), platform.python_version(), installed])

    def fill(directory: Path) -> dict[str, Any]:
        digest, size = sha256(), 0
        with (directory / "prose.jsonl").open("w", encoding="utf-8") as stream:
            for document in _documents():
                stream.write(json.dumps({"text": document}) + "\n")
                encoded = document.encode()
                digest.update(encoded + b"\0")
                size += len(encoded)
        return {"bytes": size, "sha256": digest.hexdigest()}

    made = cached_directory("prose", content, fill)
    return {**made, "file": made["directory"] / "prose.jsonl"}


def _documents() -> Iterator[str]:
    """Yield the prose of every topic and module, without paragraphs that came before."""
    seen: set[str] = set()
    for texts in _sources():
        paragraphs = [paragraph for text in texts for paragraph in paragraphs_of(text)]
        new = [paragraph for paragraph in dict.fromkeys(paragraphs) if paragraph not in seen]
        seen.update(new)
        if new:
            yield "\n\n".join(new) + "\n"


def _sources() -> Iterator[list[str]]:
    from pydoc_data.topics import topics

    yield from ([text] for _, text in sorted(topics.items()))
    roots = [Path(sysconfig.get_path("stdlib"))]
    roots += [Path(spec.origin).parent for name in PACKAGES if (spec := find_spec(name)) and spec.origin]
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            if not SKIPPED_FOLDERS & set(file.relative_to(root).parts):
                yield docstrings(file)


def docstrings(file: Path) -> list[str]:
    """Return the docstrings of a module, its classes and functions, in their order; none if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def paragraphs_of(text: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring that are prose, each as one line.

    Doctests, code, tables and lists of parameters are left out; markup of reStructuredText is reduced to its words.
    """
    for paragraph in re.split(r"\n\s*\n", cleandoc(text)):
        lines = [line.strip() for line in paragraph.splitlines() if line.strip()]
        heading = lines[0] if lines else ""
        if len(lines) > 1 and RULE.fullmatch(lines[1]):
            lines = lines[2:]
        if TABLES.fullmatch(heading) or any(map(NOT_PROSE.match, lines)):
            continue
        text = REST_QUOTE.sub(r"\1", REST_ROLE.sub(r"\1", REST_DIRECTIVE.sub("", " ".join(lines))))
        words = text.replace("**", "").replace("::", ":").split()
        plain = sum(PLAIN_WORD.fullmatch(word) is not None for word in words)
        line = " ".join(words)
        # Half of a surrogate pair is not printable: it could not be written.
        if len(words) >= FEWEST_WORDS and plain >= PLAIN_SHARE * len(words) and line.isprintable():
            yield line
