"""Records with one wrong field each, which must be read or refused."""

import copy
import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

from leanqkv.errors import LeanError

WRONG = (None, "x", -1, 1e30, 10**400, math.nan, [], {}, [1], True, {"a": [1]}, [["x"]], "")


def places(content: Any, at: tuple = ()) -> Iterator[tuple]:
    """Yield the place of every field, of lists of the first entry and the last."""
    yield at
    keys = content if isinstance(content, dict) else sorted({0, len(content) - 1} if isinstance(content, list) else ())
    for key in keys if content else ():
        yield from places(content[key], (*at, key))


def damages(content: Any) -> Iterator[tuple[tuple, Any]]:
    """Yield copies of a record, in each of which one field has another value or is missing.

    Of a model's configuration, which is compared as a whole, the first fields are enough.
    """
    skipped = [("config", name) for name in list(content.get("config", ()))[4:]]
    for at in places(content):
        if at[:2] in skipped:
            continue
        for value in (*WRONG, "missing"):
            damaged = copy.deepcopy(content)
            if not at:
                yield at, value
                continue
            parent = functools.reduce(operator.getitem, at[:-1], damaged)
            if value == "missing":
                del parent[at[-1]]
            else:
                parent[at[-1]] = value
            yield at, damaged


def read_or_refuse(read: Callable[[], object], at: tuple) -> bool:
    """Whether a damaged record is refused, in a line; anything but a LeanError fails the test."""
    try:
        read()
    except LeanError as error:
        assert "\n" not in str(error) and len(str(error)) < 600, at
        return True
    return False
