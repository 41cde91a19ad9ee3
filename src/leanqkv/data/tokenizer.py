"""The tokenizer: a named one, or a byte-level BPE trained on the corpus."""

from collections.abc import Callable, Iterator
from copy import deepcopy

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ..checkpoints.tokenizer import framing, vocabulary
from ..compat import panics_are_errors
from ..errors import LeanError
from .corpus import encodable

END_OF_TEXT, MASK = "<|endoftext|>", "[MASK]"
# The merges hardly change after this much text.
TRAINING_CHARACTERS = 16 * 2**20


def train_tokenizer(
    documents: Iterator[str], vocab_size: int, progress: Callable[[str], None] = lambda doing: None
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocab_size` tokens on the first 16 Mi characters of `documents`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(leading_text(documents, TRAINING_CHARACTERS, progress), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def with_mask_token(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that has a mask token: the same one, or a copy with [MASK] behind its last token.

    Raises:
        LeanError: the model has no number left for it.
    """
    if tokenizer.mask_token_id is None:
        tokenizer = deepcopy(tokenizer)
        tokenizer.add_special_tokens({"mask_token": MASK})
        if tokenizer.mask_token_id >= vocab_size:
            raise LeanError(
                f"the tokenizer has no mask token, and the model's vocabulary of {vocab_size:,} has no number left for "
                f"one; set vocab_size={vocabulary(tokenizer)}, or give a `tokenizer` with a mask token"
            )
    elif tokenizer.mask_token_id >= vocab_size:
        raise LeanError(
            f"the tokenizer's mask token is number {tokenizer.mask_token_id}, the model's vocabulary ends at "
            f"{vocab_size - 1}; set vocab_size={vocabulary(tokenizer)}"
        )
    return tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str | None) -> Tensor:
    """Return the token ids of a prompt, [1, length]; an empty one is the token that texts begin with.

    It begins as the tokenizer begins a text, once, also where the prompt itself opens with that token; it is not ended.

    Raises:
        LeanError: it is no text in UTF-8.
    """
    encodable(prompt or "", "the prompt")
    around = framing(tokenizer)
    with panics_are_errors("the prompt"):
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
    if around.begin is not None and ids[:1] != [around.begin]:
        ids = [around.begin, *ids]
    if not ids:
        ids = [around.end if tokenizer.bos_token_id is None else tokenizer.bos_token_id]
    return torch.tensor([ids])


def leading_text(
    documents: Iterator[str], characters: int, progress: Callable[[str], None] = lambda doing: None
) -> Iterator[str]:
    """Yield the documents up to `characters` characters, and report how many are read."""
    read = reported = 0
    for document in documents:
        yield document[: characters - read]
        read += len(document)
        if read - reported >= 2**20:
            progress(f"training the tokenizer, {min(read, characters) / 1e6:.0f} million characters read")
            reported = read
        if read >= characters:
            return
