"""Models to decode with, and rows decoded together."""

from shapes import randomize, tiny

from leanqkv import LeanForCausalLM
from leanqkv.inference.batch import Row, Scheduler
from leanqkv.presets.catalog import MECHANISMS

PROMPT = 9
# Of rows decoded together.
LENGTHS, NEW = (9, 3, 17, 1, 9, 12), (12, 5, 20, 9, 1, 30)


def build(shape: str, *mechanisms: str, **fields) -> LeanForCausalLM:
    config = tiny(shape, *mechanisms, **{"max_position_embeddings": 64, **fields})
    model = randomize(LeanForCausalLM(config), std=0.2).eval()
    model.generation_config.pad_token_id = 0
    return model


def names() -> list[tuple[str, ...]]:
    """Every mechanism that a language model can have, alone."""
    several: list[tuple[str, ...]] = [(), ("mla",), ("mla", "skipv1"), ("gqa", "skipv1"), ("skipv1", "nonlinear-query")]
    return several + [(name,) for name in MECHANISMS if name != "mla"]


def run(scheduler: Scheduler, given: list[Row], every: int = 0) -> dict[Row, list[int]]:
    """The events of each row, that a new one comes `every` steps, without the None at its end."""
    events, coming, steps = {row: [] for row in given}, list(given), 0
    while coming or scheduler.busy:
        while coming and steps >= every * (len(given) - len(coming)):
            scheduler.waiting.append(coming.pop(0))
        for row, event in scheduler.advance():
            events[row].append(event)
        steps += 1
    ended = [found.pop() for found in events.values()]
    assert ended == [None] * len(given)
    return events
