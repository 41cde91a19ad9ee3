"""Results in a form that is the same on every machine, and what differs between two of them."""

import difflib
import hashlib
import html
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from leanqkv.environment import versions

# Entries of records that differ from run to run, or from machine to machine.
CHANGING = re.compile("seconds|tokens_per_second|^(time|hardware|versions|git_commit|lm_eval|numpy)$")
HASHED = {"tokenizer.json", ".npy", ".bin"}
# Entries of records that are sizes of rounding errors.
NOISE = {"max_abs", "relative", "kl", "distance", "explained"}
# A share is of up to some hundred tokens, of which a few may round otherwise.
SHARES = {"agreement", "greedy_agreement"}
NUMBER = re.compile(r"(?<![\w.])[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?%?")
WIDTH = 140


def shown(text: str) -> list[str]:
    """Return the lines of a terminal or a page without what changes, rules, and runs of spaces."""
    for version in versions().values():
        text = re.sub(rf"(?<![\w.]){re.escape(version)}(?![\w.])", "VERSION", text)
    text = re.sub(r"python -m pytest\.?(\w+)", r"\1", text)
    text = re.sub(r"[\d.,]+( (?:new )?tokens/s| seconds\b| s\b| min\b| ms\b| GB (?:are )?free)", r"#\1", text)
    text = re.sub(r"instructions \w+, cores \d+", "instructions #, cores #", text)
    text = re.sub(r"\b[0-9a-f]{40}(\+changes)?\b", "COMMIT", text)
    lines = (" ".join(re.sub(r"[─-╿]", " ", line).split()) for line in text.splitlines())
    return [line for line in lines if line]


def page(text: str) -> list[str]:
    """Return the words of a page, a line for every paragraph, heading and row of a table."""
    text = re.sub(r"<(head|style|script)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r"<svg\b.*?</svg>", " [figure] ", text, flags=re.DOTALL)
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"</t[dh]>", " | ", text)
    text = re.sub(r"<(p|h\d|tr|li|div|section|table|figcaption|summary|pre)\b", r"\n<\1", text)
    return shown(html.unescape(re.sub(r"<[^>]*>", "", text)))


def record(value: Any, name: str = "") -> Any:
    """Return what JSON holds without what changes, with numbers rounded; of long lists the length and the ends."""
    if CHANGING.search(name):
        return "…"
    if isinstance(value, dict):
        return {key: record(one, key) for key, one in value.items()}
    if isinstance(value, list):
        ends = value if len(value) <= 16 else [*value[:4], f"… {len(value)} …", *value[-4:]]
        return [record(one) for one in ends]
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return shown(value) if isinstance(value, str) and "\n" in value else value


def tensor(value: torch.Tensor) -> str:
    """Return dtype and shape, the root of the mean square, and a projection that order and signs decide."""
    flat = value.double().flatten()
    size = float(flat.square().mean().sqrt())
    turned = float(flat @ torch.arange(1, len(flat) + 1, dtype=torch.float64).cos()) / max(size, 1e-30)
    return f"{value.dtype} {list(value.shape)} {size:.5g} {turned / len(flat) ** 0.5:.2f}".replace("torch.", "")


def files(directory: Path) -> Any:
    """Return every file below a directory with what must not change of it; of a file this alone."""
    if directory.is_file():
        return content(directory)
    return {str(path.relative_to(directory)): content(path) for path in sorted(directory.rglob("*")) if path.is_file()}


def content(path: Path) -> Any:
    """Return what must not change of a file; None where that is its name alone."""
    if path.suffix == ".safetensors":
        return {name: tensor(value) for name, value in sorted(load_file(path).items())}
    if HASHED & {path.name, path.suffix}:
        return sha256(path)
    readers = {".json": lambda text: record(json.loads(text)), ".html": page, ".md": shown}
    return readers[path.suffix](path.read_text()) if path.suffix in readers else None


def without_decimals(value: Any) -> Any:
    """Return results without the numbers that can be measured ones: those that are not whole, or are large."""
    if isinstance(value, dict | list):
        names = value if isinstance(value, dict) else range(len(value))
        items = {name: without_decimals(value[name]) for name in names}
        return items if isinstance(value, dict) else list(items.values())
    return (
        re.sub(r"\d[\d,]*\.\d+|\b\d{3,}\b", "#", value)
        if isinstance(value, str)
        else "#"
        if isinstance(value, float)
        else value
    )


def named_once(results: dict[str, Any]) -> dict[str, Any]:
    """Return results in which a file with the content of an earlier one has its name instead."""
    seen: dict[str, str] = {}
    for result in results.values():
        folders = {folder: held for folder, held in result.items() if isinstance(held, dict)}
        for folder, name in [(folder, name) for folder, held in folders.items() for name in held]:
            text, path = json.dumps(folders[folder][name]), f"{folder}/{name}"
            if len(text) > WIDTH and seen.setdefault(text, path) != path:
                folders[folder][name] = f"as {seen[text]}"
    return results


def sha256(path: Path) -> str:
    """Return the hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def written(value: Any, indent: str = "") -> str:
    """Return JSON with every list and object that fits into a line in one line."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= WIDTH:
        return line
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    named = {json.dumps(name, ensure_ascii=False): one for name, one in value.items()} if opening == "{" else {}
    items = [(f"{name}: ", one) for name, one in named.items()] or [("", one) for one in value]
    lines = [f"{indent} {name}{written(one, indent + ' ')}" for name, one in items]
    return "\n".join((opening, ",\n".join(lines), indent + closing))


def difference(found: Any, golden: Any) -> str:
    """Return the lines in which results differ; empty where they do not."""
    lines = (written(value).splitlines() for value in (golden, found))
    return "\n".join(difflib.unified_diff(*lines, "golden", "found", lineterm="", n=2))


def settled(found: Any, golden: Any, name: str = "") -> Any:
    """Return what is found, with the golden value in place of every number that differs by rounding alone.

    Args:
        name: of the entry.
    """
    if isinstance(found, dict) and isinstance(golden, dict):
        return {name: settled(value, golden[name], name) if name in golden else value for name, value in found.items()}
    if isinstance(found, list) and isinstance(golden, list):
        one, other = ([NUMBER.sub("#", json.dumps(value)) for value in values] for values in (found, golden))
        result = list(found)
        for at, there, size in difflib.SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks():
            for i in range(size):
                result[at + i] = settled(found[at + i], golden[there + i], name)
        return result
    if isinstance(found, str) and isinstance(golden, str):
        same = NUMBER.sub("#", found) == NUMBER.sub("#", golden)
        return golden if same and all(map(_alike_words, NUMBER.findall(found), NUMBER.findall(golden))) else found
    if isinstance(found, float) and isinstance(golden, float):
        return golden if _alike(found, golden, 0.02 if name in SHARES else 1e-6, name in NOISE) else found
    return found


def _alike_words(one: str, other: str) -> bool:
    if one == other or not {".", "e"} & set(one + other):
        return one == other
    unit = 2.0 if other.endswith("%") else 1.5 * 10.0 ** -len(other.partition(".")[2])
    numbers = (float(word.replace(",", "").replace("−", "-").rstrip("%")) for word in (one, other))
    return _alike(*numbers, unit, "e" in other)


def _alike(one: float, other: float, unit: float, noise: bool) -> bool:
    """Whether two numbers are one; of the sizes of rounding errors, whether their magnitude is."""
    if noise and one and other:
        return abs(math.log10(abs(one / other))) < 1.5
    return math.isclose(one, other, rel_tol=1e-2, abs_tol=unit)
