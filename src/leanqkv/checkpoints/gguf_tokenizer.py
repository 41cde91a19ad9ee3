"""The tokenizer in a GGUF file, as the tokenizer of transformers that it was made from."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..compat import quiet_transformers
from ..errors import LeanError, first_line
from .gguf_format import Array, GgufFile

TOKENS = "tokenizer.ggml.tokens"
# Names of transformers for tokens with a role -> those in the file.
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class Cutting(NamedTuple):
    """How a byte-level tokenizer splits text before it merges, as the `tokenizer.json` of its model says.

    transformers has other subsets of this in each version, and a wrong one is not noticed: it only costs accuracy.
    """

    pattern: str | None = None  # None: that of GPT-2
    then_gpt2: bool = False  # GPT-2's pattern on top
    composed: bool = False  # characters are composed (NFC)
    whole_words: bool = False  # a word that is a token is not merged from its parts
    begins: bool = False  # a text begins with a token of its own, unless the file says otherwise


_LETTERS_AND_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = Cutting(_ENGLISH + r"\p{N}{1,3}" + _LETTERS_AND_SIGNS, whole_words=True, begins=True)
_QWEN2 = Cutting(_ENGLISH + r"\p{N}" + _LETTERS_AND_SIGNS, composed=True)
# By the names of llama.cpp.
CUTTINGS = {
    "gpt-2": Cutting(),
    "smollm": Cutting(r"\p{N}", then_gpt2=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": Cutting(_TEKKEN, whole_words=True, begins=True),
}


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer in a GGUF file, with its chat template, as transformers makes it.

    Raises a LeanError if there is none, or one whose way of cutting text is not known.
    """
    file = GgufFile.open(path)
    settings = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    kind = settings.get("model")
    if kind not in ("gpt2", "llama"):
        raise LeanError(f"{path} has a tokenizer of kind {kind!r}; only gpt2 and llama can be read")
    if not isinstance(settings.get("tokens"), Array):
        raise LeanError(f"{path} lacks the metadata {TOKENS}, and so a tokenizer")
    cutting = _cutting(file) if kind == "gpt2" else None
    begins = settings.get("add_bos_token", cutting is None or cutting.begins)
    tokenizer = _convert(file, bool(begins))
    if cutting is not None:
        _cut_like(cutting, tokenizer.backend_tokenizer)
    elif (spaced := tokenizer.tokenize("a")[0].startswith("▁")) != settings.get("add_space_prefix", True):
        raise LeanError(f"{path}: tokenizer.ggml.add_space_prefix {not spaced} cannot be read")
    return tokenizer


def _cutting(file: GgufFile) -> Cutting:
    """Return how a byte-level vocabulary cuts text; only old files of GPT-2 do not say it."""
    original = "gpt-2" if file.metadata.get("general.architecture") == "gpt2" else None
    name = file.metadata.get("tokenizer.ggml.pre", original)
    if name not in CUTTINGS:
        known = ", ".join(CUTTINGS)
        raise LeanError(
            f"{file.path}: tokenizer.ggml.pre {name!r} is not known, only {known}; text would be cut wrongly"
        )
    return CUTTINGS[name]


def _convert(file: GgufFile, begins: bool) -> PreTrainedTokenizerFast:
    """Return what transformers makes of the vocabulary."""
    ids: dict[str, Any] = {role: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for role, name in ROLES.items()}
    # In a directory of its own: a tokenizer.json beside the file would be read in its place.
    with TemporaryDirectory() as alone, quiet_transformers():
        Path(alone, "model.gguf").symlink_to(file.path.resolve())
        try:
            texts = file.texts(TOKENS, {token for token in ids.values() if token is not None})
            settings: dict[str, Any] = {role: texts.get(token) for role, token in ids.items()}
            settings["add_bos_token"] = begins
            tokenizer = PreTrainedTokenizerFast.from_pretrained(alone, gguf_file="model.gguf", **settings)
            tokenizer("a")
        except Exception as error:  # the converters raise whatever a damaged vocabulary makes them
            raise LeanError(f"the tokenizer of {file.path} cannot be read: {first_line(error)}") from None
    return tokenizer


def _cut_like(cutting: Cutting, tokenizer: Tokenizer) -> None:
    """Make a byte-level tokenizer treat text as `cutting` says."""
    split = [] if cutting.pattern is None else [pre_tokenizers.Split(Regex(cutting.pattern), "isolated")]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split or cutting.then_gpt2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, by_bytes])
    tokenizer.normalizer = normalizers.NFC() if cutting.composed else None
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.model.ignore_merges = cutting.whole_words


def has_tokenizer(path: Path) -> bool:
    """Whether a GGUF file has a tokenizer."""
    return isinstance(GgufFile.open(path).metadata.get(TOKENS), Array)
