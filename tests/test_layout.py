"""Heads whose keys and values come from different layers: where attention calls are cut."""

import pytest

from leanqkv.model.layout import HeadLayout, HeadSource, head_groups

Edges = tuple[tuple[int, int, int], ...]

CASES: list[tuple[Edges, Edges]] = [  # sources of keys and of values: layer, start, stop
    (((1, 0, 4),), ((1, 0, 2), (0, 2, 4))),
    (((1, 0, 2), (0, 2, 4)), ((1, 0, 4),)),
    (((2, 0, 1), (0, 3, 6)), ((2, 0, 2), (1, 5, 6), (0, 0, 1))),
    (((2, 0, 4),), ((2, 0, 1), (2, 0, 1), (0, 2, 3), (2, 1, 2))),
    (((3, 0, 3), (0, 1, 2), (1, 0, 2)), ((3, 2, 3), (0, 2, 7))),
]


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("keys, values", CASES)
def test_every_head_keeps_its_key_and_its_value(keys: Edges, values: Edges, group: int) -> None:
    def heads(sources) -> list[tuple[int, int]]:
        return [(source.layer, head) for source in sources for head in range(source.start, source.stop)]

    of_keys, of_values = (tuple(HeadSource(*edges) for edges in table) for table in (keys, values))
    layout = HeadLayout(group * len(heads(of_keys)), of_keys, of_values)
    groups = head_groups(layout)
    assert [(found.queries.start, found.queries.stop) for found in groups] == [
        (group * sum(stop - start for _, start, stop in keys[:i]), group * sum(b - a for _, a, b in keys[: i + 1]))
        for i in range(len(keys))
    ]
    assert tuple(found.keys for found in groups) == of_keys
    for found in groups:
        assert len(heads([found.keys])) == len(heads(found.values))
    assert [head for found in groups for head in heads(found.values)] == heads(of_values)
