"""What a smaller cache does to speed: decoding steps and prompts against the same model's cache of 16 bits, in turns.

Quantized caches, latents, and both, of two shapes: SmolLM2-135M's, of grouped heads, and `llama-130m`. What a mechanism
or a precision keeps of the bytes is the plan's. Weights and the contents of the cache are random. Beside the time of a
step stands what reading its bytes and multiplying would take by themselves, at the rates of this machine.

    OMP_NUM_THREADS=2 python benchmarks/decode_caches.py --dtype bf16 --out results/decode/caches-bf16.json
    python benchmarks/decode_caches.py --tables results/decode/caches-bf16.json
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import harness
import torch
from decode_variants import copy_bandwidth, in_turns

from leanqkv import LeanForCausalLM
from leanqkv.cache_bits import CacheBits
from leanqkv.inference import Decoder, allocate_cache
from leanqkv.presets import preset

SHAPES = {
    "SmolLM2-135M": "llama-130m+hidden_size=576+intermediate_size=1536+num_hidden_layers=30+num_attention_heads=9"
    "+num_key_value_heads=3+head_dim=64+vocab_size=49152+tie_word_embeddings=true",
    "llama-130m": "llama-130m",
}
# Mechanisms of kinds of latents, by the name of the conversion that makes them.
KINDS = {
    "latents": "latent-keys:rank={rank}+latent-values:rank={rank},keys=true",
    "separate latents": "latent-keys:rank={rank}+latent-values:rank={rank}",
    "unrotated latents": "latent-keys:rank={rank},before_rotary=true+latent-values:rank={rank},keys=true",
}
# By name, a form of the cache: a kind of latents, the share of the heads' columns that they keep, and bits.
CACHES: dict[str, tuple[str | None, float, str]] = {
    "16 bits": (None, 1.0, "16"),
    "8/4 bits": (None, 1.0, "8/4"),
    "4 bits": (None, 1.0, "4"),
    "latents 84%": ("latents", 0.84, "16"),
    "separate latents 84%": ("separate latents", 0.84, "16"),
    "separate latents 50%": ("separate latents", 0.5, "16"),
    "separate latents 84%, 4 bits": ("separate latents", 0.84, "4"),
    "unrotated latents 50%": ("unrotated latents", 0.5, "16"),
    "unrotated latents 50%, 4 bits": ("unrotated latents", 0.5, "4"),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CELLS, PROMPTS = ((8, 4096), (1, 4096), (1, 512)), (512, 4096)


def decoders(shape: str, dtype: torch.dtype, caches: Sequence[str]) -> Iterator[tuple[str, Decoder, dict[str, Any]]]:
    """Yield every form of the cache with a decoder, and what it costs: see `costs`."""
    whole = preset(SHAPES[shape])
    columns, built = whole.num_key_value_heads * whole.head_dim, dict[tuple[str | None, float], Any]()
    for name in caches:
        kind, share, bits = CACHES[name]
        rank = round(share * columns / 2) * 2
        if (kind, share) not in built:
            torch.manual_seed(0)
            latents = f"+{KINDS[kind].format(rank=rank)}" if kind else ""
            config = preset(f"{SHAPES[shape]}{latents}+max_position_embeddings=8192")
            built[kind, share] = LeanForCausalLM(config).to(dtype).eval()
        model, chosen = built[kind, share], CacheBits.of(bits)
        held = chosen.bytes_per_token(model.config.plan, dtype)
        # A query is multiplied with the columns of keys, and its weight with those of values; or with the latents' own,
        # behind which stand the keys that values are made of.
        read = {None: 2 * whole.head_dim, "latents": 3 * rank, "separate latents": 2 * rank}
        # Keys before rotary positions are made for all queries that share them at once.
        read["unrotated latents"] = whole.head_dim + 2 * rank + columns * rank / whole.num_attention_heads
        cost = {
            "share": held / whole.plan.kv_bytes_per_token(dtype),
            "cache_bytes": held,
            "weight_bytes": weight_bytes(model),
            "multiplications": whole.num_hidden_layers * whole.num_attention_heads * read[kind],
            "prompt_multiplications": {str(length): prompt_multiplications(model, length) for length in PROMPTS},
        }
        yield name, Decoder(model, cache_bits=chosen), cost


def weight_bytes(model: LeanForCausalLM) -> int:
    """Return the bytes of the weights that a step reads: all but the rows of the embedding."""
    config, sizes = model.config, {name: weight.nbytes for name, weight in model.named_parameters()}
    return sum(sizes.values()) - (0 if config.tie_word_embeddings else sizes["model.embed_tokens.weight"])


def prompt_multiplications(model: LeanForCausalLM, length: int) -> int:
    """Return the multiplications of a prompt that is read at once: of weights, once a token, and of attention, to the
    tokens before."""
    config = model.config
    products = sum(
        module.weight.numel() * getattr(module, "products", 1)
        for module in model.model.layers.modules()
        if hasattr(module, "weight") and module.weight.dim() > 1  # not of norms
    )
    attended = config.num_hidden_layers * config.num_attention_heads * 2 * config.head_dim
    return length * products + length * (length + 1) // 2 * attended


def multiplications_per_second() -> float:
    """Return how many float32 multiplications, each with an addition, a product of large matrices makes."""
    one, other, times = torch.randn(1024, 1024), torch.randn(1024, 1024), []
    for _ in range(15):
        start = time.perf_counter()
        torch.mm(one, other)
        times.append(time.perf_counter() - start)
    return 1024**3 / median(times)


def fill(decoder: Decoder, batch: int, context: int, room: int) -> None:
    """Give the decoder a cache of `context` random tokens."""
    decoder.cache, decoder.mask = allocate_cache(decoder.config, context + room, decoder.cache_bits), None
    for layer in decoder.config.plan.layers:
        shapes = [(batch, cached.num_heads, context, cached.head_dim) for cached in layer.cached]
        held = [torch.randn(shape, dtype=decoder.model.dtype) for shape in shapes]
        decoder.cache.update(held[0], held[1] if len(held) > 1 else held[0][:, :0], layer.layer)


def row(times: dict[str, list[float]], costs: dict[str, dict[str, Any]], **where: Any) -> Iterator[dict[str, Any]]:
    """Yield what every form came to beside the first, round by round."""
    first = next(iter(times.values()))
    for name, own in times.items():
        ratios = [base / other for base, other in zip(first, own, strict=True)]
        yield {
            **where,
            "cache": name,
            **costs[name],
            "ms": harness.spread(own),
            "ratio": harness.spread(ratios),
        }
        print(where, name, harness.spread_text(harness.spread(ratios), 2), flush=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, list[dict[str, Any]]] = {"decode": [], "prefill": []}
    rates = {"copy_gigabytes_per_second": copy_bandwidth(), "multiplications_per_second": multiplications_per_second()}
    with torch.inference_mode():
        for shape in options.shape:
            made = list(decoders(shape, DTYPES[options.dtype], options.caches))
            sides, costs = {name: one for name, one, _ in made}, {name: cost for name, _, cost in made}
            for batch, context in CELLS:
                repetitions, token = max(2, 16 // batch), torch.zeros(batch, dtype=torch.long)
                for decoder in sides.values():
                    fill(decoder, batch, context, (options.rounds + 2) * repetitions)
                calls = {name: (lambda one=one, token=token: one.step(token)) for name, one in sides.items()}
                times = in_turns(calls, options.rounds, repetitions)  # type: ignore[arg-type]
                rows["decode"] += row(times, costs, shape=shape, batch=batch, context=context)
                for decoder in sides.values():
                    decoder.cache = None
            for length in PROMPTS:
                ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))
                calls = {name: (lambda one=one, ids=ids: one.prefill(ids, room=0)) for name, one in sides.items()}
                times = in_turns(calls, options.prompt_rounds, 1)  # type: ignore[arg-type]
                rows["prefill"] += row(times, costs, shape=shape, batch=1, context=length)
    return {"dtype": options.dtype, "threads": torch.get_num_threads(), "rounds": options.rounds, **rates, **rows}


def tables(record: dict[str, Any]) -> str:
    """Return the speeds beside the source's: a line for each form, a column for each cell."""
    shown = []
    for shape in dict.fromkeys(one["shape"] for one in record["decode"]):
        cells = [(kind, *where) for kind in ("decode", "prefill") for where in _cells(record[kind], shape)]
        heads = [f"{'prompt of' if kind == 'prefill' else f'{batch} ×'} {context:,}" for kind, batch, context in cells]
        lines = []
        for name in _caches(record["decode"], shape):
            found = [_find(record[kind], shape, name, batch, context) for kind, batch, context in cells]
            speeds = [harness.spread_text(one["ratio"], 2) for one in found]
            lines.append((name, f"{found[0]['share']:.0%}", *speeds))
        shown.append(f"{shape}, {record['dtype']}:\n\n" + harness.table(("cache", "bytes", *heads), lines))
        shown.append(bounds(record, shape))
        if "prompt_multiplications" in record["prefill"][0]:
            shown.append(prompt_bounds(record, shape))
    return "\n\n".join(shown)


def bounds(record: dict[str, Any], shape: str) -> str:
    """Return what the first cell's step takes, and what its bytes and its multiplications would take alone."""
    batch, context = CELLS[0]
    lines = []
    for name in _caches(record["decode"], shape):
        found = _find(record["decode"], shape, name, batch, context)
        tokens = batch * context
        read = (found["weight_bytes"] + tokens * found["cache_bytes"]) / 1e9
        made = tokens * found["multiplications"] / 1e9
        by_bytes = 1e3 * read / record["copy_gigabytes_per_second"]
        by_products = 1e12 * made * _time_of_one(name, record["dtype"]) / record["multiplications_per_second"]
        numbers = f"{read * 1e3:,.0f}", f"{by_bytes:.0f}", f"{made:.1f}", f"{by_products:.0f}"
        lines.append((name, f"{found['ms']['median']:.0f}", *numbers))
    heads = (
        "cache",
        f"a step of {batch} × {context:,}, ms",
        "bytes, MB",
        "alone, ms",
        "multiplications, 10⁹",
        "alone, ms",
    )
    return harness.table(heads, lines)


def prompt_bounds(record: dict[str, Any], shape: str) -> str:
    """Return the speeds of prompts, and what the multiplications alone make of them."""
    rows = [one for one in record["prefill"] if one["shape"] == shape]
    lines = []
    for name in _caches(rows, shape):
        line = [name]
        for length in dict.fromkeys(one["context"] for one in rows):
            found, source = (_find(rows, shape, cache, 1, length) for cache in (name, rows[0]["cache"]))
            ratio = source["prompt_multiplications"][str(length)] / found["prompt_multiplications"][str(length)]
            line += [harness.spread_text(found["ratio"], 2), f"{ratio:.2f}"]
        lines.append(tuple(line))
    heads = [head for length in PROMPTS for head in (f"prompt of {length:,}", "by multiplications")]
    return harness.table(("cache", *heads), lines)


def _time_of_one(cache: str, dtype: str) -> float:
    """The time of a multiplication, in that of one of floats: but for those that keys are made of, codes are multiplied
    four at once, with factors in so many parts, or in pairs, which is as many (attention.cpp)."""
    kind, _, bits = CACHES[cache]
    if bits == "16" or kind == "unrotated latents":
        return 1.0
    return (3 if dtype == "fp32" else 2) / 4


def _cells(rows: list[dict[str, Any]], shape: str) -> list[tuple[int, int]]:
    return list(dict.fromkeys((one["batch"], one["context"]) for one in rows if one["shape"] == shape))


def _caches(rows: list[dict[str, Any]], shape: str) -> list[str]:
    return list(dict.fromkeys(one["cache"] for one in rows if one["shape"] == shape))


def _find(rows: list[dict[str, Any]], *of: Any) -> dict[str, Any]:
    return next(one for one in rows if tuple(one[key] for key in ("shape", "cache", "batch", "context")) == of)


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--caches", nargs="+", choices=list(CACHES), default=list(CACHES), metavar="CACHE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt-rounds", type=int, default=2)
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
