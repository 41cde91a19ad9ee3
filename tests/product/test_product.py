"""Every mechanism under every tool that wraps, rewrites or bypasses modules: right by a number, or refused by name.

The documentation shows the outcomes as `results/tools.json` has them, which `benchmarks/tools.py` writes.
"""

import json
from pathlib import Path

import pytest

from product.groups import GROUPS
from product.mechanisms import CASES, Case
from product.tools import Tool, outcome

TOOLS = [tool for tools in GROUPS.values() for tool in tools]
RECORD = json.loads((Path(__file__).parents[2] / "results" / "tools.json").read_text())
RECORDED = {tool["tool"]: tool["outcomes"] for tools in RECORD["groups"].values() for tool in tools}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_right_or_refused(tool: Tool, case: Case) -> None:
    if tool.missing:
        pytest.skip(tool.missing)
    number, refusal = outcome(tool, case)
    if refusal is None:
        assert number <= tool.tolerance
    else:
        assert "\n" not in refusal and any(word in refusal for word in case.words), refusal
    recorded = RECORDED.get(tool.name, {}).get(case.name)
    assert recorded, "not in results/tools.json: run python benchmarks/tools.py --out results/tools.json"
    assert recorded["refusal"] == refusal, "results/tools.json has another outcome"


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_blocks_in_turns_are_treated_as_blocks_in_runs(tool: Tool) -> None:
    if tool.missing:
        pytest.skip(tool.missing)
    runs = next(case for case in CASES if case.name == "shared blocks")
    number, refusal = outcome(tool, runs._replace(fields=runs.fields | {"group_order": "turns"}))
    recorded = RECORDED[tool.name][runs.name]["refusal"]
    assert refusal == recorded or (recorded and "group_order is 'turns'" in refusal)
    assert refusal or number <= tool.tolerance


def test_the_record_is_of_these_tools_and_mechanisms() -> None:
    limits = {tool["tool"]: tool["tolerance"] for tools in RECORD["groups"].values() for tool in tools}
    assert limits == {tool.name: tool.tolerance for tool in TOOLS}
    assert all(list(outcomes) == [case.name for case in CASES] for outcomes in RECORDED.values())
    for tool, outcomes in RECORDED.items():
        assert all(outcome["refusal"] or outcome["number"] <= limits[tool] for outcome in outcomes.values()), tool
