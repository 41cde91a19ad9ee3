"""Python files of a folder as JSONL, one document each: hundreds of MB of text that any environment of Python has.

Each different file of 500 to 200,000 characters once, in the order of their hashes, up to `--characters`.

    python benchmarks/python_sources.py "$(python -c 'import site; print(site.getsitepackages()[0])')" sources.jsonl
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

LENGTHS = range(500, 200_000)


def documents(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the hash and the text of every Python file that can be read."""
    for path in sorted(folder.rglob("*.py")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) in LENGTHS:
            yield hashlib.sha256(text.encode()).hexdigest(), text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--characters", type=int, default=330_000_000)
    options = parser.parse_args()
    left = options.characters
    with options.out.open("w", encoding="utf-8") as file:
        for _, text in sorted(dict(documents(options.folder)).items()):
            if left <= 0:
                break
            left -= len(text)
            file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
