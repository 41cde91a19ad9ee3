"""Tasks of lm-eval made of local files: PIQA, the last word of passages, and retrieval from long contexts.

Needles and keys are those of RULER (Hsieh et al. 2024, https://arxiv.org/abs/2404.06654, section 3), which KVPress runs
as well: a sentence with a number in a long text (niah_single_2), and one of many such sentences that fill the context
(niah_multikey_2). Passages are chosen as in LAMBADA (Paperno et al. 2016, https://arxiv.org/abs/1606.06031): the last
word of the last sentence occurs before. All are drawn from one seed.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from ..data.corpus import open_corpus
from ..data.tokenizing import plain
from ..errors import LeanError
from ..files import read_yaml

SEED = 0
# How deep in the text a needle stands, in percent; questions take turns.
DEPTHS = (0, 25, 50, 75, 100)
# Questions that are made, at most.
PASSAGES, NEEDLES = 500, 100
# Tokens of text around a needle, at least.
LEAST_TEXT = 64
# What says how long a question is.
LENGTH = "`context_length` (of frontier `sequence_length`)"
# Words of a passage before its last sentence, at least, and letters of its last word.
PASSAGE_WORDS, WORD_LETTERS = 60, 4
# Characters that are read for each token that is needed.
CHARACTERS = 12
SENTENCE = re.compile(r"(?<=[.!?])\s+")
ABOUT = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. I will quiz you "
    "about the numbers afterwards."
)
FACT = "One of the special magic numbers for {key} is: {value}."
QUESTION = "What is the special magic number for {key} mentioned in the provided text?"
ANSWER = "The special magic number for {key} mentioned in the provided text is"
FIRST = """
    able bold brave brief broad calm cheap clean clear cold cool dark deep dense dry dull early empty fair fast fine
    firm flat free fresh full glad good grand gray great green happy hard heavy high huge icy keen kind large late lazy
"""
SECOND = """
    acorn apple arrow badge baker basin beach bench berry board boat bridge brush cabin camel candle canyon castle chair
    cloud coast coin comet coral crane desk door eagle engine fabric falcon feather field flame forest fountain garden
    glove harbor helmet hill island jacket kettle ladder lake lamp lemon
"""
KEYS = [f"{first}-{second}" for first in FIRST.split() for second in SECOND.split()]


def local_task(name: str, tokenizer: PreTrainedTokenizerFast | None, length: int | None) -> Any:
    """Return lm-eval's task of a name such as `needle:book.txt`, or None of another name.

    Args:
        tokenizer, length: of the model, and the tokens of a question with its answer at most; for retrieval.

    Raises:
        LeanError: no such file, or too little text in it.
    """
    kind, _, source = name.partition(":")
    if kind in MAKERS and (kind == "recall") != bool(source):
        if kind in ("needle", "recall") and (tokenizer is None or length is None):
            raise LeanError(
                f"`tasks`: {kind} has as many tokens as the model's context and is for `leanqkv eval` alone"
            )
        return MAKERS[kind](source, tokenizer, length)
    return None


def _piqa(folder: str, *_: Any) -> Any:
    """The validation set of PIQA (Bisk et al. 2019, https://arxiv.org/abs/1911.11641), asked as lm-eval asks it."""
    files = [Path(folder) / file for file in ("valid.jsonl", "valid-labels.lst")]
    if missing := [file for file in files if not file.is_file()]:
        raise LeanError(
            f"`tasks=piqa:{folder}`: there is no {missing[0]}; give PIQA's folder, which has both its files"
        )
    lines, labels = (file.read_text(encoding="utf-8").split("\n") for file in files)
    try:
        pairs = list(zip(filter(None, lines), filter(None, labels), strict=True))
        documents = [{**json.loads(line), "label": int(label)} for line, label in pairs]
        asked = [{name: one[name] for name in ("goal", "sol1", "sol2", "label")} for one in documents]
    except (ValueError, TypeError, KeyError) as error:
        raise LeanError(f"`tasks=piqa:{folder}`: not PIQA's format, questions and a label for each: {error}") from None
    import lm_eval.tasks

    config = read_yaml(Path(lm_eval.tasks.__file__).parent / "piqa" / "piqa.yaml")
    for name in ("dataset_path", "dataset_name", "training_split"):
        del config[name]
    return _task("piqa", asked, {}, **{**config, "validation_split": "test"})


def _cloze(source: str, *_: Any) -> Any:
    random.Random(SEED).shuffle(found := list(_passages(source)))
    if not found:
        raise LeanError(
            f"`tasks=cloze:{source}` finds no passage of {PASSAGE_WORDS} words and more whose last word occurs before; "
            "give more text, of a language that separates words by spaces"
        )
    return _generated("cloze", source, found[:PASSAGES])


def _passages(source: str) -> Iterator[dict[str, Any]]:
    """Whole sentences, without the last word."""
    for document in open_corpus(source).documents():
        before: list[list[str]] = []
        for sentence in filter(None, map(str.split, SENTENCE.split(document))):
            while len(before) > 1 and sum(map(len, before[1:])) >= PASSAGE_WORDS:
                del before[0]
            words, word = [one for words in before for one in words], sentence[-1].rstrip(".!?")
            known = word.isalpha() and len(word) >= WORD_LETTERS and word in {one.strip(".,;:!?()\"'") for one in words}
            if known and len(sentence) > 1 and len(words) >= PASSAGE_WORDS:
                yield {"text": " ".join([*words, *sentence[:-1]]), "answer": word}
                before = []
            else:
                before.append(sentence)


def _needle(source: str, tokenizer: PreTrainedTokenizerFast, length: int) -> Any:
    """A sentence in text of the source, at a depth."""
    size = _counter(tokenizer)
    longest = max(KEYS, key=size)
    needed = length - size(_asked(" " + FACT.format(key=longest, value=10**6), longest) + f" {10**6}")
    text, cut = "", NEEDLES * max(needed, 0) * CHARACTERS
    for document in open_corpus(source).documents():
        text += document.strip() + "\n\n"
        if len(text) > cut:
            break
    offsets = plain(tokenizer).encode(text, add_special_tokens=False).offsets
    found = f"`tasks=needle:{source}`: a context of {length:,} tokens"
    if needed < LEAST_TEXT:
        raise LeanError(f"{found} has no room for {LEAST_TEXT} tokens of text; choose a longer {LENGTH}")
    if needed > len(offsets):
        raise LeanError(
            f"{found} takes {needed:,} tokens of text, and there are {len(offsets):,}; give more text, or a shorter "
            f"{LENGTH}"
        )

    def question(number: int, draw: random.Random) -> dict[str, Any]:
        depth, key, value = DEPTHS[number % len(DEPTHS)], draw.choice(KEYS), _value(draw)
        start, tokens = (len(offsets) - needed) * number // (NEEDLES - 1), needed
        while True:  # what is cut out of a text may be one token more or less
            here = text[offsets[start][0] : offsets[start + tokens - 1][1]]
            ends = [0, *(match.end() for match in SENTENCE.finditer(here)), len(here)]
            at = min(ends, key=lambda end: abs(end - len(here) * depth / 100))
            context = f"{here[:at].rstrip()} {FACT.format(key=key, value=value)} {here[at:].lstrip()}".strip()
            asked = _asked(context, key)
            if (excess := size(f"{asked} {value}") - length) <= 0:
                return {"text": asked, "answer": value, "depth": depth}
            tokens -= excess

    return _generated("needle", source, _drawn(question), context_length=length, depths=list(DEPTHS))


def _recall(_: str, tokenizer: PreTrainedTokenizerFast, length: int) -> Any:
    """One of as many sentences as fit."""
    size = _counter(tokenizer)
    fact = max(size("\n" + FACT.format(key=key, value=10**7 - 1)) for key in KEYS)
    count = (length - size(_asked("", max(KEYS, key=size)) + f" {10**6}")) // fact
    if not 2 <= count <= len(KEYS):
        raise LeanError(
            f"`tasks=recall` at a context of {length:,} tokens has {max(count, 0):,} keys, and can have 2 to "
            f"{len(KEYS):,}; choose another {LENGTH}"
        )

    def question(number: int, draw: random.Random) -> dict[str, Any]:
        facts = [(key, _value(draw)) for key in draw.sample(KEYS, count)]
        depth = DEPTHS[number % len(DEPTHS)]
        key, value = facts[round((count - 1) * depth / 100)]
        context = "\n".join(FACT.format(key=key, value=value) for key, value in facts)
        return {"text": _asked(context, key), "answer": value, "depth": depth}

    return _generated("recall", "", _drawn(question), context_length=length, depths=list(DEPTHS), keys=count)


MAKERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "piqa": _piqa,
    "cloze": _cloze,
    "needle": _needle,
    "recall": _recall,
}


def _drawn(question: Callable[[int, random.Random], dict[str, Any]]) -> list[dict[str, Any]]:
    draw = random.Random(SEED)
    return [question(number, draw) for number in range(NEEDLES)]


def _value(draw: random.Random) -> str:
    return str(draw.randrange(10**6, 10**7))


def _asked(context: str, key: str) -> str:
    return f"{ABOUT}\n{context}\n{QUESTION.format(key=key)} {ANSWER.format(key=key)}"


def _counter(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], int]:
    return lambda text: len(tokenizer(text)["input_ids"])


def _generated(kind: str, source: str, documents: list[dict[str, Any]], **about: Any) -> Any:
    """A task whose answer follows a text: whether it is the likeliest at every token, and its loss in nats."""

    def scores(document: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, float]:
        [(likelihood, likeliest)] = results
        return {"acc": float(likeliest), "loss": -likelihood}

    metrics = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    metrics += [{"metric": "loss", "aggregation": "mean", "higher_is_better": False}]
    name = f"{kind}:{Path(source).stem}" if source else kind
    return _task(
        name,
        documents,
        {**about, "seed": SEED},
        output_type="loglikelihood",
        test_split="test",
        doc_to_text=lambda document: document["text"],
        doc_to_target=lambda document: f" {document['answer']}",
        process_results=scores,
        metric_list=metrics,
    )


def _task(name: str, documents: list[dict[str, Any]], about: dict[str, Any], **config: Any) -> Any:
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    about |= {"questions_sha256": hashlib.sha256(json.dumps(documents).encode()).hexdigest()}
    config["metadata"] = {"version": 1.0, **(config.get("metadata") or {}), "made_of": about}
    data = {"test": Dataset.from_list(documents)}
    return ConfigurableTask(config={**config, "task": name, "custom_dataset": lambda **_: data})
