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
from statistics import median
from typing import Any

import harness
import torch

from leanqkv import LeanForCausalLM, cache_bytes
from leanqkv.environment import git_commit
from leanqkv.files import read_json
from leanqkv.inference import Decoder, allocate_cache
from leanqkv.memory import PeakMemory
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
    """Give the decoder a cache of `context` random tokens."""
    config = decoder.config
    decoder.cache = allocate_cache(config, context + room)
    for layer in config.plan.layers:
        shapes = [(batch, cached.num_heads, context, cached.head_dim) for cached in layer.cached]
        if shapes:
            held = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
            decoder.cache.update(held[0], held[1] if len(held) > 1 else held[0][:, :0], layer.layer)


def step_bytes(decoder: Decoder, batch: int, context: int) -> tuple[int, int]:
    """Return the bytes that a step reads: each byte once, and borrowed heads once for every borrower.

    Once: every weight but the embedding's, of which a step reads one row a token, and the cache. The second number
    holds if nothing stays in the processor's caches from one layer to the next.
    """
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
    """Return the multiplications of a prefill, per sequence: matrices, causal scores, weighted sums; the head once."""
    plan = decoder.config.plan
    outside = ("model.embed", "lm_head")
    matrices = sum(w.numel() for n, w in decoder.model.named_parameters() if w.ndim == 2 and not n.startswith(outside))
    heads = sum(layer.num_query_heads * layer.head_dim for layer in plan.layers)
    return length * matrices + heads * length * (length + 1)


def in_turns(sides: dict[str, Callable[[], None]], rounds: int, repetitions: int) -> dict[str, list[float]]:
    """Time the sides in turns and return the milliseconds of every round but the first two, which warm up."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    for round_ in range(rounds + 2):
        for side, once in (reversed if round_ % 2 else list)(list(sides.items())):
            start = time.perf_counter()
            for _ in range(repetitions):
                once()
            times[side].append(1e3 * (time.perf_counter() - start) / repetitions)
    return {side: of[2:] for side, of in times.items()}


def compared(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return median milliseconds of each side, and the second's speed over the first's: median, least and most."""
    ratios = [base / other for base, other in zip(*times.values(), strict=True)]
    return {"milliseconds": {side: median(of) for side, of in times.items()}, "ratio": harness.spread(ratios)}


def decoding(sides: dict[str, Decoder], batch: int, context: int, options: argparse.Namespace) -> dict[str, Any]:
    repetitions = max(2, options.steps // (batch * context // 4096 + 1))
    token = torch.zeros(batch, dtype=torch.long)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(options.fills):  # where the memory of a cache lies makes some per cent of difference
        for decoder in sides.values():
            fill(decoder, batch, context, (options.rounds + 2) * repetitions)
        calls = {name: (lambda decoder=decoder: decoder.step(token)) for name, decoder in sides.items()}
        for side, milliseconds in in_turns(calls, options.rounds, repetitions).items():  # type: ignore[arg-type]
            times[side] += milliseconds
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


def prefill(sides: dict[str, Decoder], batch: int, length: int, options: argparse.Namespace) -> dict[str, Any]:
    ids = torch.randint(1000, (batch, length), generator=torch.Generator().manual_seed(0))
    calls = {name: (lambda decoder=decoder: decoder.prefill(ids, room=0)) for name, decoder in sides.items()}
    times = in_turns(calls, options.rounds, 1)  # type: ignore[arg-type]
    base, other = (multiplications(decoder, length) for decoder in sides.values())
    return {"batch": batch, "length": length, **compared(times), "predicted": [base / other]}


def chunked(decoder: Decoder, batch: int, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time a prompt whole and in chunks, and return the largest memory beside weights and cache."""
    ids = torch.randint(1000, (batch, length), generator=torch.Generator().manual_seed(0))
    usual = decoder.chunk

    def prefill(chunk: int) -> None:
        decoder.chunk = chunk
        decoder.prefill(ids, room=0)

    chunks = (length, *CHUNKS)
    times = in_turns({str(chunk): partial(prefill, chunk) for chunk in chunks}, options.rounds, 1)
    activations = {}
    for chunk in chunks:
        decoder.cache = None
        with PeakMemory() as counted:
            prefill(chunk)
        assert decoder.cache is not None
        activations[str(chunk)] = counted.peak - cache_bytes(decoder.cache)
    decoder.chunk, decoder.cache = usual, None
    milliseconds = {chunk: harness.spread(of) for chunk, of in times.items()}
    return {"batch": batch, "length": length, "milliseconds": milliseconds, "activation_bytes": activations}


def latent(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time MLA's absorbed form against the expanded one, which touches the whole history at every step."""
    sides = {"expanded": build("mla"), "absorbed": build("mla")}
    for name, decoder in sides.items():
        for module in decoder.model.modules():
            if isinstance(module, LatentAttention):
                module._absorbing_pays = lambda *_, pays=name == "absorbed": pays  # type: ignore[method-assign]
    rows = []
    for context, batch in product(OTHER_CONTEXTS, BATCHES):
        row = {"model": "mla", **decoding(sides, batch, context, options)}
        row["predicted"] = []  # both read the same weights and cache; the expanded form writes and reads more
        rows.append(report("decode", row))
    return rows


def copy_bandwidth() -> float:
    """Return the GB/s of a large copy, bytes read and bytes written."""
    source, target = (torch.ones(2**28, dtype=torch.uint8) for _ in range(2))  # zeros might be one page of the system's
    times = []
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2 * len(source) / median(times) / 1e9


def report(what: str, row: dict[str, Any]) -> dict[str, Any]:
    """Print a row as it is measured, and return it."""
    cell = f"batch {row['batch']}, {row.get('context', row.get('length'))} tokens"
    ratio = harness.spread_text(row["ratio"], 3)
    print(f"{row['model']} {what}, {cell}: {ratio}, predicted {_range(row['predicted'])}", flush=True)
    return row


def _range(numbers: list[float], how: str = ".2f") -> str:
    return "–".join(dict.fromkeys(format(number, how) for number in numbers)) or "–"


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    return "\n\n".join((decode_table(record), prefill_table(record["prefill"]), chunk_table(record["chunks"])))


def decode_table(record: dict[str, Any]) -> str:
    rows = []
    for row in record["decode"]:
        milliseconds = row["milliseconds"]
        first, second = milliseconds
        rate = row["gigabytes_per_second"][second]
        copied = record.get("measured_again", {}).get(row["model"], record)["copy_gigabytes_per_second"]
        rows.append(
            (
                row["model"] + (f", {second}" if row["model"] == "mla" else ""),
                str(row["batch"]),
                f"{row['context']:,}",
                f"{milliseconds[second]:.1f} (against {milliseconds[first]:.1f})",
                harness.spread_text(row["ratio"]),
                _range(row["predicted"]),
                _range([row[what][second] / 1e6 for what in ("bytes", "bytes_read_again")], ".0f"),
                f"{rate:.0f}",
                f"{rate / copied:.0%}",
            )
        )
    headers = ("decoding", "batch", "context", "step, ms", "speed", "by bytes", "bytes, MB", "GB/s", "of a copy's")
    return harness.table(headers, rows)


def prefill_table(measured: list[dict[str, Any]]) -> str:
    rows = []
    for row in measured:
        first, second = row["milliseconds"].values()
        times = (f"{second:.0f} (against {first:.0f})", harness.spread_text(row["ratio"]), _range(row["predicted"]))
        rows.append((row["model"], str(row["batch"]), f"{row['length']:,}", *times))
    return harness.table(("prefill", "batch", "tokens", "ms", "speed", "by multiplications"), rows)


def chunk_table(measured: list[dict[str, Any]]) -> str:
    rows = []
    for row in measured:
        for chunk, milliseconds in row["milliseconds"].items():
            size = "all" if int(chunk) == row["length"] else chunk
            beside = f"{row['activation_bytes'][chunk] / 1e6:.0f}"
            shape = (str(row["batch"]), f"{row['length']:,}", size)
            rows.append((*shape, harness.spread_text(milliseconds, 0), beside))
    headers = ("prefill, batch", "tokens", "in chunks of", "ms", "beside weights and cache, MB")
    return harness.table(headers, rows)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the options ask for; with --only and a record in --out, that record with its part replaced."""
    measured: dict[str, Any] = {
        "base": BASE,
        "rounds": options.rounds,
        "fills": options.fills,
        "copy_gigabytes_per_second": copy_bandwidth(),
        "decode": [],
        "prefill": [],
        "chunks": [],
    }
    baseline = build()
    for name in (name for name in VARIANTS if options.only in (None, name)):
        sides = {"baseline": baseline, name: build(name)}
        for context, batch in product(CONTEXTS.get(name, OTHER_CONTEXTS), BATCHES):
            measured["decode"].append(report("decode", {"model": name, **decoding(sides, batch, context, options)}))
        for batch, length in PROMPTS:
            measured["prefill"].append(report("prefill", {"model": name, **prefill(sides, batch, length, options)}))
    if options.only in (None, "mla"):
        measured["decode"] += latent(options)
    if options.only in (None, "chunks"):
        measured["chunks"] = [chunked(baseline, batch, length, options) for batch, length in LONG_PROMPTS]
    if options.only is not None and options.out is not None and options.out.exists():
        return updated(read_json(options.out), measured, options.only)
    return measured


def updated(record: dict[str, Any], measured: dict[str, Any], only: str) -> dict[str, Any]:
    """Return the record with the rows of `only` replaced by those measured again, and a note of when that was."""
    if only == "chunks":
        rows = {"chunks": measured["chunks"]}
    else:
        others = {what: [row for row in record[what] if row["model"] != only] for what in ("decode", "prefill")}
        rows = {what: kept + measured[what] for what, kept in others.items()}
    again = {key: measured[key] for key in ("rounds", "fills", "copy_gigabytes_per_second")}
    again["git_commit"] = git_commit()
    return record | rows | {"measured_again": {**record.get("measured_again", {}), only: again}}


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("--only", choices=(*VARIANTS, "mla", "chunks"), help="others are kept, if --out has a record")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fills", type=int, default=3, help="of the cache, with so many rounds each")
    parser.add_argument("--steps", type=int, default=24, help="in a row, of a short context")
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
