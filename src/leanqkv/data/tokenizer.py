"""The tokenizer: a named one, or a byte-level BPE trained on the corpus."""

from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..checkpoints.gguf_format import is_gguf
from ..checkpoints.gguf_tokenizer import load_tokenizer as load_gguf_tokenizer
from ..errors import LeanError, first_line
from .corpus import encodable, looks_like_path

END_OF_TEXT = "<|endoftext|>"
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


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """Return the fast tokenizer of a directory, a GGUF file or a hub name.

    Raises:
        LeanError: none there, or none that marks the end of a text.
    """
    if looks_like_path(str(name)) and not Path(name).exists():
        raise LeanError(f"no tokenizer at {name}: there is no such directory")
    try:
        tokenizer = load_gguf_tokenizer(Path(name)) if is_gguf(name) else AutoTokenizer.from_pretrained(str(name))
    except LeanError:
        raise
    except Exception as error:  # transformers raises a dozen kinds; each means that there is no usable tokenizer
        reason = first_line(error)
        if Path(name).is_dir() and not (Path(name) / "tokenizer.json").exists():
            reason = "it has no tokenizer.json; put the files of the tokenizer that goes with the model there"
        raise LeanError(f"no tokenizer at {name}: {reason}") from None
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise LeanError(f"the tokenizer {name} cannot be used: it needs a fast version and an end-of-text token")
    return tokenizer  # type: ignore[return-value]


def vocabulary(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return how many tokens a model needs for a tokenizer: its numbers may have gaps, and `len` counts tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def identity(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return what tells a tokenizer from others: models of one family often differ in the token that ends a text."""
    return f"{tokenizer.backend_tokenizer.to_str()}\0{tokenizer.special_tokens_map}\0{tokenizer.chat_template}"


def encode_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str | None) -> Tensor:
    """Return the token ids of a prompt, [1, length]; an empty one is the token that texts begin with.

    Raises:
        LeanError: it is no text in UTF-8.
    """
    encodable(prompt or "", "the prompt")
    # A tokenizer of ours adds no token to a prompt, as in training; LLaMA's puts one before it.
    text = prompt or tokenizer.bos_token or tokenizer.eos_token
    return tokenizer(text, return_tensors="pt", add_special_tokens=bool(prompt))["input_ids"]


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
