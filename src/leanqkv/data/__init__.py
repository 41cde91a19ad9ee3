"""Data: corpora, tokenizers, prepared files of tokens and images, and the batch plan that compared runs share."""

from .batches import IGNORED, BatchPlan, batch_plan, check_plan, collate, make_batch_plan, make_image_plan
from .corpus import Corpus, open_corpus, read_pieces
from .evaluation import EvaluationText, evaluation_text, unseen_split
from .images import ImageData, image_batch, prepare_images, processor_settings, scaled_pixels
from .prepare import prepare_data
from .token_files import TokenData, Tokens, stored_tokens

__all__ = [
    "IGNORED",
    "BatchPlan",
    "Corpus",
    "EvaluationText",
    "ImageData",
    "TokenData",
    "Tokens",
    "batch_plan",
    "check_plan",
    "collate",
    "evaluation_text",
    "image_batch",
    "make_batch_plan",
    "make_image_plan",
    "open_corpus",
    "prepare_data",
    "prepare_images",
    "processor_settings",
    "read_pieces",
    "scaled_pixels",
    "stored_tokens",
    "unseen_split",
]
