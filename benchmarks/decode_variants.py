"""What a mechanism does to speed: decoding steps and prefill against the baseline's, taking turns in one process.

SkipV1, the identity query and the nonlinear query against `llama-130m`, and MLA in its absorbed form against its
expanded one. Each ratio stands beside what bytes (decoding) or multiplications (prefill) alone would give. Weights and
the contents of the cache are random.

    OMP_NUM_THREADS=2 python benchmarks/decode_variants.py --out results/decode/variants.json
    python benchmarks/decode_variants.py --tables results/decode/variants.json
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from leanqkv import LeanForCausalLM, cache_bytes
from leanqkv.environment import git_commit, hardware, versions
from leanqkv.files import RECORD_FORMAT, read_json, write_json
from leanqkv.inference import Decoder, allocate_cache
from leanqkv.inference.memory import PeakMemory
from leanqkv.model.attention_latent import LatentAttention
from leanqkv.presets import preset

BASE, POSITIONS = "llama-130m", 8192
VARIANTS = ("skipv1", "identity-query", "nonlinear-query")
CONTEXTS, BATCHES = {"skipv1": (512, 1024, 2048, 4096)}, (1, 8)
OTHER_CONTEXTS = (512, 4096)
PROMPTS = ((1, 512), (8, 512), (1, 2048))
LONG_PROMPTS, CHUNKS = ((1, 4096), (8, 1024)), (512, 128)


def build(*mechanisms: str) -> Decoder:
    torch.manual_seed(0)
    config = preset("+".join((BASE, *mechanisms, f"max_position_embeddings={POSITIONS}")))
    return Decoder(LeanForCausalLM(config).to(torch.bfloat16).eval())


def fill(decoder: Decoder, batch: int, context: int, room: int) -> None:
    """A cache of `context` random tokens."""
    config = decoder.config
    decoder.cache = allocate_cache(config, context + room)
    for layer in config.plan.layers:
        shapes = [(batch, cached.num_heads, context, cached.head_dim) for cached in layer.cached]
        if shapes:
            held = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
            decoder.cache.update(held[0], held[1] if len(held) > 1 else held[0][:, :0], layer.layer)


def step_bytes(decoder: Decoder, batch: int, context: int) -> tuple[int, int]:
    """What a step must read at least, each byte once: every weight but the embedding's, of which a row a token, and the
    cache. And what it reads if nothing stays in the processor's caches from one layer to the next: what is borrowed is
    then read by every borrower."""
    config = decoder.config
    weights = sum(w.numel() for name, w in decoder.model.named_parameters() if "embed_tokens" not in name)
    if config.tie_word_embeddings:
        weights += decoder.model.model.embed_tokens.weight.numel()
    attended = 0
    for layer in config.plan.layers:
        if layer.latent is not None:
            attended += layer.latent.rank + layer.latent.rope_dim
        for group in layer.groups:
            attended += layer.head_dim * sum(source.num_heads for source in (group.keys, *group.values))
    once = 2 * weights + batch * config.plan.kv_bytes(context, torch.bfloat16)
    return once, 2 * (weights + batch * context * attended)


def multiplications(decoder: Decoder, length: int) -> int:
    """Of a prefill, per sequence: matrices, causal scores and their sums; the head at one position."""
    plan = decoder.config.plan
    outside = ("model.embed", "lm_head")
    matrices = sum(w.numel() for n, w in decoder.model.named_parameters() if w.ndim == 2 and not n.startswith(outside))
    heads = sum(layer.num_query_heads * layer.head_dim for layer in plan.layers)
    return length * matrices + heads * length * (length + 1)


def in_turns(sides: dict[str, Callable[[], None]], rounds: int, repetitions: int) -> dict[str, list[float]]:
    """Milliseconds of every round, without the first two, which warm up."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    for round_ in range(rounds + 2):
        for side, once in (reversed if round_ % 2 else list)(list(sides.items())):
            start = time.perf_counter()
            for _ in range(repetitions):
                once()
            times[side].append(1e3 * (time.perf_counter() - start) / repetitions)
    return {side: of[2:] for side, of in times.items()}


def compared(times: dict[str, list[float]]) -> dict[str, Any]:
    """Median milliseconds of each side, and the second's speed over the first's: median, least and most."""
    ratios = [base / other for base, other in zip(*times.values(), strict=True)]
    return {
        "milliseconds": {side: median(of) for side, of in times.items()},
        "ratio": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def decoding(sides: dict[str, Decoder], batch: int, context: int, asked: argparse.Namespace) -> dict[str, Any]:
    repetitions = max(2, asked.steps // (batch * context // 4096 + 1))
    token = torch.zeros(batch, dtype=torch.long)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(asked.fills):  # where the memory of a cache lies makes some per cent of difference
        for decoder in sides.values():
            fill(decoder, batch, context, (asked.rounds + 2) * repetitions)
        calls = {name: (lambda decoder=decoder: decoder.step(token)) for name, decoder in sides.items()}
        for side, found in in_turns(calls, asked.rounds, repetitions).items():  # type: ignore[arg-type]
            times[side] += found
        for decoder in sides.values():
            decoder.cache = None
    once, again = ({name: step_bytes(of, batch, context)[i] for name, of in sides.items()} for i in (0, 1))
    row = compared(times)
    return {
        "batch": batch,
        "context": context,
        **row,
        "bytes": once,
        "bytes_read_again": again,
        "gigabytes_per_second": {name: again[name] / row["milliseconds"][name] / 1e6 for name in sides},
        "predicted": [base / other for base, other in (again.values(), once.values())],
    }


def prefill(sides: dict[str, Decoder], batch: int, length: int, asked: argparse.Namespace) -> dict[str, Any]:
    ids = torch.randint(1000, (batch, length), generator=torch.Generator().manual_seed(0))
    calls = {name: (lambda decoder=decoder: decoder.prefill(ids, room=0)) for name, decoder in sides.items()}
    times = in_turns(calls, asked.rounds, 1)  # type: ignore[arg-type]
    base, other = (multiplications(decoder, length) for decoder in sides.values())
    return {"batch": batch, "length": length, **compared(times), "predicted": [base / other]}


def chunked(decoder: Decoder, batch: int, length: int, asked: argparse.Namespace) -> dict[str, Any]:
    """A prompt whole against in chunks, and what is held at one time beside weights and cache."""
    ids = torch.randint(1000, (batch, length), generator=torch.Generator().manual_seed(0))
    usual = decoder.chunk

    def prefill(chunk: int) -> None:
        decoder.chunk = chunk
        decoder.prefill(ids, room=0)

    chunks = (length, *CHUNKS)
    times = in_turns({str(chunk): partial(prefill, chunk) for chunk in chunks}, asked.rounds, 1)
    activations = {}
    for chunk in chunks:
        decoder.cache = None
        with PeakMemory() as counted:
            prefill(chunk)
        assert decoder.cache is not None
        activations[str(chunk)] = counted.peak - cache_bytes(decoder.cache)
    decoder.chunk, decoder.cache = usual, None
    return {"batch": batch, "length": length, **spreads(times), "activation_bytes": activations}


def spreads(times: dict[str, list[float]]) -> dict[str, Any]:
    """Median, least and most milliseconds."""
    return {"milliseconds": {of: {"median": median(t), "min": min(t), "max": max(t)} for of, t in times.items()}}


def latent(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """MLA: the absorbed form against the expanded one, which must touch the whole history at every step."""
    sides = {"expanded": build("mla"), "absorbed": build("mla")}
    for name, decoder in sides.items():
        for module in decoder.model.modules():
            if isinstance(module, LatentAttention):
                module._absorbing_pays = lambda *_, pays=name == "absorbed": pays  # type: ignore[method-assign]
    found = []
    for context, batch in product(OTHER_CONTEXTS, BATCHES):
        row = {"model": "mla", **decoding(sides, batch, context, asked)}
        row["predicted"] = []  # both read the same weights and cache; the expanded form writes and reads more
        found.append(tell("decode", row))
    return found


def copy_bandwidth() -> float:
    """GB/s of a large copy, bytes read and bytes written."""
    source, target = (torch.ones(2**28, dtype=torch.uint8) for _ in range(2))  # zeros might be one page of the system's
    times = []
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2 * len(source) / median(times) / 1e9


def tell(what: str, row: dict[str, Any]) -> dict[str, Any]:
    ratio = row["ratio"]
    expected = f", predicted {_range(row['predicted'])}"
    where = f"batch {row['batch']}, {row.get('context', row.get('length'))} tokens"
    print(
        f"{row['model']} {what}, {where}: {ratio['median']:.3f} ({ratio['min']:.3f}-{ratio['max']:.3f}){expected}",
        flush=True,
    )
    return row


def _range(numbers: list[float], how: str = ".2f") -> str:
    return "–".join(dict.fromkeys(format(number, how) for number in numbers)) or "–"


def tables(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    bandwidth = record["copy_gigabytes_per_second"]
    lines = ["| decoding | batch | context | step, ms | speed | by bytes | bytes, MB | GB/s | of a copy's |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in record["decode"]:
        first, second = row["milliseconds"]
        milliseconds, rate = row["milliseconds"], row["gigabytes_per_second"][second]
        cells = (
            f"{row['model']}" + (f", {second}" if row["model"] == "mla" else ""),
            f"{row['batch']} | {row['context']:,}",
            f"{milliseconds[second]:.1f} (against {milliseconds[first]:.1f})",
            f"{row['ratio']['median']:.2f} ({row['ratio']['min']:.2f}–{row['ratio']['max']:.2f})",
            _range(row["predicted"]),
            _range([row[what][second] / 1e6 for what in ("bytes", "bytes_read_again")], ".0f"),
            f"{rate:.0f} | {rate / bandwidth:.0%}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| prefill | batch | tokens | ms | speed | by multiplications |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in record["prefill"]:
        first, second = row["milliseconds"].values()
        spread = f"{row['ratio']['median']:.2f} ({row['ratio']['min']:.2f}–{row['ratio']['max']:.2f})"
        cells = (row["model"], f"{row['batch']} | {row['length']:,}", f"{second:.0f} (against {first:.0f})")
        lines.append("| " + " | ".join((*cells, spread, _range(row["predicted"]))) + " |")
    lines += ["", "| prefill, batch | tokens | in chunks of | ms | beside weights and cache, MB |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for row in record["chunks"]:
        for chunk, of in row["milliseconds"].items():
            size = "all" if int(chunk) == row["length"] else chunk
            milliseconds = f"{of['median']:.0f} ({of['min']:.0f}–{of['max']:.0f})"
            held = f"{row['activation_bytes'][chunk] / 1e6:.0f}"
            lines.append(f"| {row['batch']} | {row['length']:,} | {size} | {milliseconds} | {held} |")
    return "\n".join(lines)


def updated(record: dict[str, Any], new: dict[str, Any], only: str) -> dict[str, Any]:
    """The rows of `only`, which were measured again, in the places of the old ones."""
    if only == "chunks":
        rows = {"chunks": new["chunks"]}
    else:
        rows = {what: [row for row in record[what] if row["model"] != only] for what in ("decode", "prefill")}
        rows = {what: kept + new[what] for what, kept in rows.items()}
    again = {key: new[key] for key in ("git_commit", "rounds", "fills", "copy_gigabytes_per_second")}
    return record | rows | {"measured_again": {**record.get("measured_again", {}), only: again}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, help="print a record as Markdown, and do nothing else")
    parser.add_argument("--only", choices=(*VARIANTS, "mla", "chunks"), help="others are kept, if --out has a record")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fills", type=int, default=3, help="of the cache, with so many rounds each")
    parser.add_argument("--steps", type=int, default=24, help="in a row, of a short context")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.tables is not None:
        print(tables(read_json(asked.tables)))
        return
    bandwidth = copy_bandwidth()
    record: dict[str, Any] = {"record": RECORD_FORMAT, "base": BASE, "copy_gigabytes_per_second": bandwidth}
    record |= {"decode": [], "prefill": [], "chunks": []}
    baseline = build()
    for name in VARIANTS:
        if asked.only not in (None, name):
            continue
        sides = {"baseline": baseline, name: build(name)}
        for context, batch in product(CONTEXTS.get(name, OTHER_CONTEXTS), BATCHES):
            row = {"model": name, **decoding(sides, batch, context, asked)}
            record["decode"].append(tell("decode", row))
        for batch, length in PROMPTS:
            record["prefill"].append(tell("prefill", {"model": name, **prefill(sides, batch, length, asked)}))
    if asked.only in (None, "mla"):
        record["decode"] += latent(asked)
    if asked.only in (None, "chunks"):
        record["chunks"] = [chunked(baseline, batch, length, asked) for batch, length in LONG_PROMPTS]
    record |= {
        "rounds": asked.rounds,
        "fills": asked.fills,
        "threads": torch.get_num_threads(),
        "hardware": hardware("cpu"),
    }
    record |= {"versions": versions(), "git_commit": git_commit()}
    if asked.only is not None and asked.out is not None and asked.out.exists():
        record = updated(read_json(asked.out), record, asked.only)
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(asked.out, record)


if __name__ == "__main__":
    main()
