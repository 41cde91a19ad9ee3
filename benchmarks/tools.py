"""Every mechanism under every tool that wraps, rewrites or bypasses modules: the number that proves it right, or the
sentence that refuses. The checks themselves are tests/product, which also compares them with this record.

python benchmarks/tools.py --out results/tools.json

peft, optimum-quanto and torchao have to be installed.
"""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import harness

from leanqkv.errors import LeanError
from leanqkv.progress import progress_bar

TESTS = Path(__file__).parent.parent / "tests"
PACKAGES = ("peft", "optimum-quanto", "torchao")


def measure(_options: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(TESTS))
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
    """Return the record as Markdown: a summary, one table for each group of tools, and the refusals."""
    refusals = [
        outcome["refusal"]
        for tools in record["groups"].values()
        for tool in tools
        for outcome in tool["outcomes"].values()
        if outcome["refusal"]
    ]
    places = {refusal: place for place, refusal in enumerate(dict.fromkeys(refusals), start=1)}
    made = {"summary": summary(record)}
    made |= {group: matrix(tools, places) for group, tools in record["groups"].items()}
    return made | {"refusals": "\n".join(f"{place}. {refusal}" for refusal, place in places.items())}


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
        return scientific(outcome["number"]) if refusal is None else f"refused ({places[refusal]})"

    names = tools[0]["outcomes"]
    rows = [(name, *(cell(tool["outcomes"][name]) for tool in tools)) for name in names]
    return harness.table(("mechanism", *(tool["tool"] for tool in tools)), rows, "l" + "r" * len(tools))


def scientific(number: float) -> str:
    return f"{number:.0e}" if number else "0"


if __name__ == "__main__":
    harness.run(harness.command_line(__doc__), measure, lambda record: "\n\n".join(tables(record).values()))
