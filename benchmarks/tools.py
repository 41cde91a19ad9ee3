"""Every mechanism under every tool that wraps, rewrites or bypasses modules: the number that proves it right, or the
sentence that refuses. The checks themselves are tests/product, which also compares them with this record.

python benchmarks/tools.py --out results/tools.json     # peft, optimum-quanto and torchao have to be installed
python benchmarks/tools.py --page results/tools.json    # write the record's tables into docs/tools.md
"""

import argparse
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import harness

from leanqkv.errors import LeanError
from leanqkv.files import read_json
from leanqkv.progress import progress_bar

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tools.md"
PACKAGES = ("peft", "optimum-quanto", "torchao")


def measure(_options: argparse.Namespace) -> dict[str, Any]:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from product.groups import GROUPS
    from product.mechanisms import CASES
    from product.tools import outcome

    groups: dict[str, list[dict[str, Any]]] = {}
    with progress_bar("mechanisms under tools") as bar:
        done, total = 0, len(CASES) * sum(map(len, GROUPS.values()))
        for group, tools in GROUPS.items():
            groups[group] = []
            for tool in tools:
                if tool.missing:
                    raise LeanError(f"{tool.name}: {tool.missing}; install it and start again")
                outcomes = {}
                for case in CASES:
                    outcomes[case.name] = outcome(tool, case)._asdict()
                    bar(done := done + 1, total)
                groups[group].append(
                    {"tool": tool.name, "number": tool.number, "tolerance": tool.tolerance, "outcomes": outcomes}
                )
    return {"packages": {package: version(package) for package in PACKAGES}, "groups": groups}


def tables(record: dict[str, Any]) -> dict[str, str]:
    """Return the record as Markdown: a summary, one table for each group of tools, and a refusal of each kind."""
    tools = [tool for group in record["groups"].values() for tool in group]
    refusals = [outcome["refusal"] for tool in tools for outcome in tool["outcomes"].values()]
    kinds: dict[str, str] = {}
    for refusal in filter(None, refusals):
        kinds.setdefault(kind_of(refusal), refusal)
    places = {kind: place for place, kind in enumerate(kinds, start=1)}
    made = {"summary": summary(record)}
    made |= {name: matrix(group, places) for name, group in record["groups"].items()}
    return made | {"refusals": "\n".join(f"{places[kind]}. {refusal}" for kind, refusal in kinds.items())}


def kind_of(refusal: str) -> str:
    """The sentence without the names and numbers that differ between mechanisms."""
    names = r"\(.*\)|\{.*?\}|'.*?'|\d+(\.\d+)?%?|(query|key|value|output)s? "
    tails = r": the layer computes.*|; (possible|nothing).*"
    return re.sub(f"{names}|{tails}", "", refusal)


def summary(record: dict[str, Any]) -> str:
    rows = []
    for tools in record["groups"].values():
        for tool in tools:
            numbers = [outcome["number"] for outcome in tool["outcomes"].values() if outcome["refusal"] is None]
            refused = len(tool["outcomes"]) - len(numbers)
            limit = scientific(tool["tolerance"])
            rows.append((tool["tool"], tool["number"], scientific(max(numbers, default=0)), limit, str(refused or "")))
    return harness.table(("tool", "number", "largest", "at most", "refused"), rows, "llrrr")


def matrix(tools: list[dict[str, Any]], places: dict[str, int]) -> str:
    """Mechanisms by tools; a refusal as its place in the list."""

    def cell(outcome: dict[str, Any]) -> str:
        refusal = outcome["refusal"]
        return scientific(outcome["number"]) if refusal is None else f"refused ({places[kind_of(refusal)]})"

    names = tools[0]["outcomes"]
    rows = [(name, *(cell(tool["outcomes"][name]) for tool in tools)) for name in names]
    return harness.table(("mechanism", *(tool["tool"] for tool in tools)), rows, "l" + "r" * len(tools))


def scientific(number: float) -> str:
    return f"{number:.0e}" if number else "0"


def fill(page: str, record: dict[str, Any]) -> str:
    """Return the page with the record's tables between their comments."""
    made = tables(record)
    groups = "\n\n".join(f"### {group}\n\n{made[group]}" for group in record["groups"])
    for name, text in {"summary": made["summary"], "groups": groups, "refusals": made["refusals"]}.items():
        block = f"<!-- {name} -->\n{text}\n<!-- end of {name} -->"
        page = re.sub(rf"<!-- {name} -->.*?<!-- end of {name} -->", lambda _, block=block: block, page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    if sys.argv[1:2] == ["--page"]:
        PAGE.write_text(fill(PAGE.read_text(), read_json(Path(sys.argv[2]))))
    else:
        harness.run(harness.command_line(__doc__), measure, lambda record: "\n\n".join(tables(record).values()))
