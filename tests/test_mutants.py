"""Every mutant of mutants.txt applies to the package as it is; `make mutants` runs the tests against them."""

import ast

import pytest
from mutants.run import ROOT, read_matrix, read_mutants

MUTANTS = read_mutants()


def test_names_are_distinct():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert read_matrix().keys() <= set(names), "matrix.json has results of mutants that are gone"


@pytest.mark.cheap_cases
@pytest.mark.parametrize("room", dict.fromkeys(mutant.name.partition(".")[0] for mutant in MUTANTS))
def test_mutants_apply(room):
    for mutant in MUTANTS:
        if mutant.name.startswith(f"{room}."):
            changed = mutant.apply()
            assert changed != (ROOT / mutant.file).read_text(encoding="utf-8"), f"{mutant.name} changes nothing"
            if mutant.file.endswith(".py"):
                ast.parse(changed, mutant.name)
            assert mutant.tests and all((ROOT / test).is_file() for test in mutant.tests), mutant.name
