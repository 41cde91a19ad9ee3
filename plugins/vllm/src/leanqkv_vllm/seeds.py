"""Seeds of requests on a CPU, whose generators cannot be set back.

Of a prompt that is read in pieces vLLM samples behind every piece, throws the token away, and sets the request's
generator back by an offset that only those of GPUs have: on a CPU that ends the engine (0.32.0).
"""

from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def _without_unused(runner: Any):
    """Take the generators of tokens that will be thrown away out of the batch, so that none is drawn from."""
    generators, rows = runner.input_batch.generators, runner.input_batch.num_reqs
    unused = np.flatnonzero(runner.discard_request_mask.np[:rows]).tolist()
    kept = {row: generators.pop(row) for row in unused if row in generators}
    try:
        yield
    finally:
        generators.update(kept)


def keep_seeds(runner: type) -> None:
    """Let a class of vLLM's model runners sample without these generators; once."""
    sample = runner.sample_tokens
    if getattr(sample, "keeps_seeds", False):
        return

    def sample_tokens(self: Any, *given: Any, **kwargs: Any) -> Any:
        with _without_unused(self):
            return sample(self, *given, **kwargs)

    sample_tokens.keeps_seeds = True  # type: ignore[attr-defined]
    runner.sample_tokens = sample_tokens
