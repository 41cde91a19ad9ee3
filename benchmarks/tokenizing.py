"""Tokens per second and core of `leanqkv tokenize --workers`, and its memory, against the tokenizers library alone.

    python benchmarks/tokenizing.py --out results/tokenizing.json
    python benchmarks/tokenizing.py --tables results/tokenizing.json

The library alone encodes documents that are in memory, as many processes at a time as there are cores, each with one
thread. The command reads JSONL files, tokenizes with as many workers, writes and hashes; in turns, on text of which
each file is another one. Memory is that of the command and its workers without what processes share (USS).
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import psutil

from leanqkv.checkpoints.tokenizer import load_tokenizer
from leanqkv.data.corpus import open_corpus
from leanqkv.data.tokenizer import train_tokenizer
from leanqkv.environment import available_cores
from leanqkv.errors import LeanError
from leanqkv.progress import progress_bar

VOCABULARY = 32_000
# Of a document: as many as a page of web text has.
CHARACTERS = 4000
FILE_BYTES = 50_000_000


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record's parts."""
    small, large = (int(1e6 * size) for size in options.megabytes)
    rows: list[dict[str, Any]] = []
    with progress_bar("measuring") as bar, tempfile.TemporaryDirectory() as place:
        tokenizer = Path(place, "tokenizer")
        train_tokenizer(open_corpus("stdlib").documents(), VOCABULARY).save_pretrained(tokenizer)
        folders = {size: Path(place, str(size)) for size in (small, large)}
        for size, folder in folders.items():
            write_text(folder, size)
        total = options.rounds + 1
        for done in range(options.rounds):
            alone = library_alone(tokenizer, next(folders[small].iterdir()), available_cores())
            rows.append({"library": alone, "command": command(folders[small], tokenizer, Path(place, f"cache{done}"))})
            bar(done + 1, total)
        memory = {"small": rows[-1]["command"], "large": command(folders[large], tokenizer, Path(place, "cache"))}
        bar(total, total)
    return {
        "workers": available_cores(),
        "bytes": [small, large],
        "vocabulary": VOCABULARY,
        "rows": rows,
        "memory": memory,
    }


def write_text(folder: Path, size: int) -> None:
    """Write documents of Python source and English prose, over and over, each time with another number in them."""
    folder.mkdir()
    written, file = 0, None
    for number, text in enumerate(documents()):
        if written % FILE_BYTES < CHARACTERS or file is None:
            file = (folder / f"{written // FILE_BYTES:04}.jsonl").open("a")
        line = json.dumps({"text": f"{number} {text}"}) + "\n"
        file.write(line)
        written += len(line)
        if written >= size:
            file.close()
            return


def documents() -> Iterator[str]:
    while True:
        for name in ("stdlib", "prose"):
            for document in open_corpus(name).documents():
                yield from (document[at : at + CHARACTERS] for at in range(0, len(document), CHARACTERS))


def library_alone(tokenizer: Path, file: Path, processes: int) -> float:
    """Return tokens per second and process of so many processes that encode the same documents at a time."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes), context.Queue()
    started = [context.Process(target=_encode, args=(tokenizer, file, barrier, results)) for _ in range(processes)]
    for process in started:
        process.start()
    rates = [results.get() for _ in started]
    for process in started:
        process.join()
    return sum(rates) / len(rates)


def _encode(tokenizer: Path, file: Path, barrier: Any, results: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    backend = load_tokenizer(tokenizer).backend_tokenizer
    with file.open() as stream:
        texts = [json.loads(line)["text"] for line in stream]
    barrier.wait()
    begun, tokens = time.perf_counter(), 0
    for start in range(0, len(texts), 256):
        batch = backend.encode_batch_fast(texts[start : start + 256], add_special_tokens=False)
        tokens += sum(map(len, batch))
    results.put(tokens / (time.perf_counter() - begun))


def command(folder: Path, tokenizer: Path, cache: Path) -> dict[str, Any]:
    """Return tokens per second and worker of the command, from its start to its end, and the most memory it takes."""
    workers = available_cores()
    words = ["tokenize", f"tiny+vocab_size={VOCABULARY}", "--data", str(folder), "--tokenizer", str(tokenizer)]
    environment = {**os.environ, "LEANQKV_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    begun, most = time.perf_counter(), 0
    run = subprocess.Popen(
        [sys.executable, "-m", "leanqkv", *words, "--workers", str(workers)], env=environment, stdout=subprocess.DEVNULL
    )
    while run.poll() is None:
        most = max(most, _memory(run.pid))
        time.sleep(0.5)
    seconds = time.perf_counter() - begun
    if run.returncode:
        raise LeanError(f"leanqkv tokenize ended with {run.returncode}")
    (about,) = cache.glob("data/*/data.json")
    content = json.loads(about.read_text())
    tokens = sum(count for _, _, count in content["train_shards"] + content["validation_shards"])
    return {"tokens": tokens, "seconds": seconds, "rate": tokens / seconds / workers, "bytes_in_memory": most}


def _memory(process: int) -> int:
    total = 0
    try:
        for each in (psutil.Process(process), *psutil.Process(process).children(recursive=True)):
            total += each.memory_full_info().uss
    except psutil.Error:  # it has just ended
        return 0
    return total


def tables(record: dict[str, Any]) -> str:
    """Return the tables of the documentation."""
    alone = [row["library"] for row in record["rows"]]
    small = [row["command"]["rate"] for row in record["rows"]]
    large = record["memory"]["large"]["rate"]
    ratios = [row["command"]["rate"] / row["library"] for row in record["rows"]]
    command = f"`leanqkv tokenize --workers {record['workers']}`, from its start to its end"
    names = [f"{command}, {size / 1e6:,.0f} MB" for size in record["bytes"]]
    speed = [
        ["the tokenizers library alone", _spread(alone), "1"],
        [names[0], _spread(small), harness.spread_text(harness.spread(ratios))],
        [names[1], f"{large:,.0f}", f"{large / harness.spread(alone)['median']:.2f}"],
    ]
    memory = [
        [f"{size / 1e6:,.0f} MB", f"{entry['tokens'] / 1e6:,.0f} million", f"{entry['bytes_in_memory'] / 1e6:,.0f} MB"]
        for size, entry in zip(record["bytes"], record["memory"].values(), strict=True)
    ]
    return (
        harness.markdown_table(("", "tokens/s of a core", "ratio"), speed)
        + "\n\n"
        + harness.markdown_table(("text", "tokens", "most memory"), memory)
    )


def _spread(rates: list[float]) -> str:
    return f"{harness.spread(rates)['median']:,.0f} ({min(rates):,.0f}–{max(rates):,.0f})"


if __name__ == "__main__":
    parser = harness.command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=float, nargs=2, default=(100, 2000), metavar=("SMALL", "LARGE"))
    harness.run(parser, measure, tables)
