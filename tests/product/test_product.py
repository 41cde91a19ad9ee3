"""Every mechanism under every tool that wraps, rewrites or bypasses modules: right by a number, or refused by name."""

import pytest

from product import generation, rewriting
from product.mechanisms import CASES, Case
from product.tools import Tool, outcome

TOOLS = [*generation.TOOLS, *rewriting.TOOLS]


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
