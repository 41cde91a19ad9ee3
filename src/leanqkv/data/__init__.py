"""Text in, batches out: corpora, tokenizer, token files, and the batch plan every run of a comparison shares."""

from .batches import BatchPlan, batch_plan, collate, make_batch_plan
from .corpus import Corpus, open_corpus
from .prepare import TokenData, prepare_data

__all__ = [
    "BatchPlan",
    "Corpus",
    "TokenData",
    "batch_plan",
    "collate",
    "make_batch_plan",
    "open_corpus",
    "prepare_data",
]
