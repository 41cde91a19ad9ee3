"""Data: corpora, tokenizers, prepared files of tokens, and the batch plan that compared runs share."""

from .batches import IGNORED, BatchPlan, batch_plan, check_plan, collate, make_batch_plan
from .corpus import Corpus, open_corpus, read_pieces
from .evaluation import EvaluationText, evaluation_text, unseen_split
from .objectives import AfterPrefix, MaskedTokens, NextToken
from .prepare import prepare_data
from .token_files import TokenData, Tokens, stored_tokens

__all__ = [
    "IGNORED",
    "AfterPrefix",
    "BatchPlan",
    "Corpus",
    "EvaluationText",
    "MaskedTokens",
    "NextToken",
    "TokenData",
    "Tokens",
    "batch_plan",
    "check_plan",
    "collate",
    "evaluation_text",
    "make_batch_plan",
    "open_corpus",
    "prepare_data",
    "read_pieces",
    "stored_tokens",
    "unseen_split",
]
