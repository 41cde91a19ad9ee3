"""The tokenizer of a checkpoint, as its makers meant it: the ids of its tokenizer.json, and what it puts around a text.

`AutoTokenizer` builds a tokenizer anew from the class that a configuration names, with the pre-tokenizer and normalizer
of that class in place of the file's. Here the file decides.
"""

import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file

from ..compat import quiet_transformers, set_backend
from ..errors import LeanError, first_line
from ..files import looks_like_path, read_json, write_json
from . import gguf_tokenizer
from .gguf_format import is_gguf

logger = logging.getLogger(__name__)

FILE, SETTINGS, TEMPLATES = "tokenizer.json", "tokenizer_config.json", "additional_chat_templates"
# Of the files beside the weights, those that are about the text and not about the tensors.
VOCABULARIES = ("vocab.json", "vocab.txt", "tokenizer.model")
TOKENIZER_FILES = (
    *(FILE, SETTINGS, "special_tokens_map.json", "added_tokens.json", "merges.txt", *VOCABULARIES),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)
# Texts that tokenizers of other classes cut in another way.
SAMPLE = (
    "In 2024 there were 10000 of 3.14159, 1,234,567 and 0x7f; I'll say they'RE half-way.",
    "def f(x):\n    if x  >= 10:\n\t\treturn  {'a': [x**2]}   \r\n\n\n# ends",
    "   three spaces first, \u00a0\u3000others, and some at the end  ",
    "日本語の文章と中文，한국어 문장。Ünïcödé e\u0301 ﬁ ① ２０２４ \U0001f600\U0001f468\u200d\U0001f469",
)


@dataclass(frozen=True)
class Framing:
    """The tokens around every text: a tokenizer's own, and the end-of-text token where it adds none at the end."""

    begin: int | None
    end: int

    @property
    def unpredicted(self) -> int | None:
        """The token that only begins texts, so that it is given and never predicted."""
        return None if self.begin == self.end else self.begin

    def frame(self, ids: list[int]) -> list[int]:
        """Return the tokens of a text that others may follow; a begin token that is the end token of the last one."""
        return [*([] if self.unpredicted is None else [self.unpredicted]), *ids, self.end]


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """Return the fast tokenizer of a directory, a GGUF file or a hub name, with exactly the ids of its tokenizer.json.

    Raises:
        LeanError: none there, damaged, without a token that marks the end of a text, or with more than one token
            before or after each text.
    """
    if looks_like_path(str(name)) and not Path(name).exists():
        raise LeanError(f"no tokenizer at {name}: there is no such directory")
    tokenizer = _read(name)
    # An end token that the settings name and the file lacks would be read as the unknown token.
    if not tokenizer.is_fast or tokenizer.backend_tokenizer.token_to_id(tokenizer.eos_token or "") is None:
        raise LeanError(f"the tokenizer {name} is unusable: it needs a fast version and an end-of-text token in {FILE}")
    framing(tokenizer)
    return tokenizer


def has_tokenizer(name: str | Path) -> bool:
    """Whether a directory or a GGUF file has a tokenizer: those of a directory in its own file."""
    return gguf_tokenizer.has_tokenizer(Path(name)) if is_gguf(name) else (Path(name) / FILE).is_file()


def _read(name: str | Path) -> Any:
    try:
        with quiet_transformers():
            tokenizer = gguf_tokenizer.load_tokenizer(Path(name)) if is_gguf(name) else _from_files(str(name))
            tokenizer("a")  # much that is wrong is noticed by then
            return tokenizer
    except LeanError:
        raise
    except BaseException as error:  # a damaged tokenizer makes its reader raise anything
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of tokenizers' Rust
            raise
        reason = first_line(error)
        if Path(name).is_dir() and not (Path(name) / FILE).exists():
            reason = f"it has no {FILE}; put the files of the tokenizer that goes with the model there"
        raise LeanError(f"no tokenizer at {name}: {reason}") from None


def _from_files(name: str) -> Any:
    try:
        file = Path(cached_file(name, FILE))  # type: ignore[arg-type]
    except OSError:  # only vocabulary and merges, from which a class builds it
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    tokenizer, exact = PreTrainedTokenizerFast.from_pretrained(name), Tokenizer.from_file(str(file))
    exact.no_truncation()
    exact.no_padding()
    _check_ids(exact)
    named = {at: token for at, token in tokenizer.added_tokens_decoder.items() if str(token) != tokenizer.eos_token}
    _add_declared(exact, named | (tokenizer.init_kwargs.get("added_tokens_decoder") or {}))
    set_backend(tokenizer, exact)
    return tokenizer


def _check_ids(tokenizer: Tokenizer) -> None:
    seen: dict[int, str] = {}
    for token, number in tokenizer.get_vocab().items():
        if (other := seen.setdefault(number, token)) != token:
            raise LeanError(f"{FILE} gives two tokens the number {number}: {other!r:.40} and {token!r:.40}")


def _add_declared(tokenizer: Tokenizer, declared: Mapping[Any, Any]) -> None:
    """Add the tokens that the settings number or name and the file lacks, as makers add tokens to a finished file."""
    vocabulary = tokenizer.get_vocab()
    for number, token in sorted((int(number), token) for number, token in declared.items()):
        token = token if isinstance(token, AddedToken) else AddedToken(**token)
        if token.content not in vocabulary:
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
            if (found := tokenizer.token_to_id(token.content)) != number:
                raise LeanError(f"{SETTINGS} gives {token.content!r:.40} the number {number}, {FILE} {found}")


def framing(tokenizer: Any) -> Framing:
    """Return the tokens around every text.

    Raises:
        LeanError: more than one before or after it.
    """
    encoding = tokenizer("a", return_special_tokens_mask=True)
    ids, text = encoding["input_ids"], [at for at, added in enumerate(encoding["special_tokens_mask"]) if not added]
    begins = sum(token == tokenizer.bos_token_id for token in ids[:1])
    # Without `text` it has no token for the letter.
    before, after = (ids[: text[0]], ids[text[-1] + 1 :]) if text else (ids[:begins], ids[begins:])
    if len(before) > 1 or len(after) > 1:
        raise LeanError(f"the tokenizer puts the tokens {before} before and {after} after each text; one each can be")
    return Framing(next(iter(before), None), next(iter(after), tokenizer.eos_token_id))


def vocabulary(tokenizer: Any) -> int:
    """Return how many tokens a model needs for a tokenizer: its numbers may have gaps, and `len` counts tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def identity(tokenizer: Any) -> str:
    """Return what tells a tokenizer from others: models of one family often differ in the token that ends a text."""
    return f"{tokenizer.backend_tokenizer.to_str()}\0{tokenizer.special_tokens_map}\0{tokenizer.chat_template}"


def check_ids(ids: Any, vocab_size: int, tokenizer: Any, place: str) -> None:
    """Check that the model has all tokens of a text, `ids`. A tokenizer may have more than it, which never occur.

    Raises:
        LeanError: it does not; `place` says whose text that is.
    """
    found = int(max(ids) if isinstance(ids, list) else ids.max()) if len(ids) else -1
    if found >= vocab_size:
        name = tokenizer.backend_tokenizer.id_to_token(found)
        shown = f"token {found}" if name is None else f"token {found}, {name!r:.60}"
        raise LeanError(f"{place} has {shown}, and the model's vocabulary ends at {vocab_size - 1}; leave it out")


def copy_tokenizer(source: Path, directory: Path, stock: bool) -> None:
    """Copy the tokenizer, chat templates and generation settings of `source`, a checkpoint's directory or GGUF file.

    Other tools read a directory with `AutoTokenizer`. Where that would cut text in another way than the source's
    tokenizer.json, the settings are written for the class that takes the file as it is.

    Args:
        stock: transformers knows the model's class, and may take a tokenizer's class of its own choice for it.

    Raises:
        LeanError: the source's tokenizer is damaged, or `AutoTokenizer` gives other ids all the same.
    """
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, directory / TEMPLATES)
    tokenizer = _read(source) if has_tokenizer(source) else _built(source)
    if tokenizer is None:
        return
    if not (directory / FILE).exists():
        tokenizer.save_pretrained(directory)
    if _differing(directory, tokenizer) is not None:
        settings = read_json(directory / SETTINGS) if (directory / SETTINGS).exists() else {}
        write_json(directory / SETTINGS, _settings_of_file(settings, tokenizer))
    if (text := _differing(directory, tokenizer)) is not None:
        message = f"AutoTokenizer cuts {text!r:.60} in another way than {FILE}, whatever {SETTINGS} says"
        if not stock:
            raise LeanError(f"{source}: {message}; remove the tokenizer's files there, and bring them in by hand")
        logger.warning("%s: load the tokenizer of %s with PreTrainedTokenizerFast", message, directory)


def _built(source: Path) -> Any | None:
    """Return the tokenizer that transformers builds of a vocabulary without tokenizer.json; None if it cannot."""
    if any((source / name).is_file() for name in VOCABULARIES):
        with suppress(LeanError):  # such as for want of sentencepiece; the model needs no tokenizer to be written
            return _read(source)
    return None


def _settings_of_file(settings: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return settings with which transformers changes nothing of a tokenizer.json."""
    changing = {"auto_map", "added_tokens_decoder", "add_bos_token", "add_eos_token", "split_special_tokens"}
    changing |= {"add_prefix_space", "tokenizer_file", "fix_mistral_regex"}
    own = {token.content: token for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values()}
    kept = {name: value for name, value in settings.items() if name not in changing}
    for name in [name for name in kept if name.endswith("_token")]:
        content = value["content"] if isinstance(value := kept[name], dict) else value
        if content in own:
            kept[name] = tokenizer.convert_added_tokens(own[content], save=True)
        elif content not in tokenizer.get_vocab():
            del kept[name]
    return {**kept, "tokenizer_class": "PreTrainedTokenizerFast"}


def _differing(directory: Path, tokenizer: Any) -> str | None:
    """Return a text that `AutoTokenizer` cuts in another way than `tokenizer`, or None."""
    try:
        with quiet_transformers():
            other = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    except Exception:  # such as for a class that is not there
        return SAMPLE[0]
    return differing(tokenizer, other)


def check_same_tokens(first: Path, second: Path, option: str, advice: str) -> None:
    """Check that two checkpoints read the same tokens of a text, where both have a tokenizer.

    A GGUF file and the checkpoint that it was made of have other files, and one of them can have unused tokens more.

    Raises:
        LeanError: they do not; `option` names the second one.
    """
    if not has_tokenizer(first) or not has_tokenizer(second):
        return
    tokenizers = [load_tokenizer(directory) for directory in (first, second)]
    one, other = (tokenizer.get_vocab().items() for tokenizer in tokenizers)
    if not (one <= other or other <= one) or differing(*tokenizers) is not None:
        raise LeanError(f"{option} {second} has another tokenizer; {advice}")


def differing(tokenizer: Any, other: Any) -> str | None:
    """Return a text that two tokenizers cut differently, of a sample that is known to tell them apart, or None."""
    special = [token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values()]
    for text in (*SAMPLE, *(f"a{token} b  {token}c" for token in special)):
        for adding in (True, False):
            if _ids(tokenizer, text, adding) != _ids(other, text, adding):
                return text
    return None


def _ids(tokenizer: Any, text: str, adding: bool) -> list[int] | None:
    with suppress(Exception):  # the text has characters that are no tokens
        return tokenizer(text, add_special_tokens=adding)["input_ids"]
    return None
