"""What a smaller cache does to speed: decoding steps and prompts against the same model's cache of 16 bits, in turns.

Quantized caches, latents, and both, of two shapes: SmolLM2-135M's, of grouped heads, and `llama-130m`. What a mechanism
or a precision keeps of the bytes is the plan's. Weights and the contents of the cache are random.

    OMP_NUM_THREADS=2 python benchmarks/decode_caches.py --dtype bf16 --out results/decode/caches-bf16.json
    python benchmarks/decode_caches.py --tables results/decode/caches-bf16.json
"""

import argparse
from collections.abc import Iterator
from typing import Any

import harness
import torch
from decode_variants import in_turns

from leanqkv import LeanForCausalLM
from leanqkv.cache_bits import CacheBits
from leanqkv.inference import Decoder, allocate_cache
from leanqkv.presets import preset

SHAPES = {
    "SmolLM2-135M": "llama-130m+hidden_size=576+intermediate_size=1536+num_hidden_layers=30+num_attention_heads=9"
    "+num_key_value_heads=3+head_dim=64+vocab_size=49152+tie_word_embeddings=true",
    "llama-130m": "llama-130m",
}
# By name, a form of the cache: the share of the heads' columns that latents keep, whether values are made of keys too,
# and bits.
CACHES: dict[str, tuple[float | None, bool, str]] = {
    "16 bits": (None, False, "16"),
    "8/4 bits": (None, False, "8/4"),
    "4 bits": (None, False, "4"),
    "latents 84%": (0.84, True, "16"),
    "separate latents 84%": (0.84, False, "16"),
    "separate latents 50%": (0.5, False, "16"),
    "separate latents 84%, 4 bits": (0.84, False, "4"),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CELLS, PROMPTS = ((8, 4096), (1, 4096), (1, 512)), (512, 4096)


def decoders(shape: str, dtype: torch.dtype) -> Iterator[tuple[str, Decoder, float]]:
    """Yield every form of the cache with a decoder and its share of the source's bytes per token."""
    whole = preset(SHAPES[shape])
    columns, built = whole.num_key_value_heads * whole.head_dim, dict[tuple[float | None, bool], Any]()
    for name, (share, reads_keys, bits) in CACHES.items():
        if (share, reads_keys) not in built:
            torch.manual_seed(0)
            rank = round((share or 0) * columns / 2) * 2
            latents = (
                f"+latent-keys:rank={rank}+latent-values:rank={rank},keys={str(reads_keys).lower()}" if share else ""
            )
            config = preset(f"{SHAPES[shape]}{latents}+max_position_embeddings=8192")
            built[share, reads_keys] = LeanForCausalLM(config).to(dtype).eval()
        model, chosen = built[share, reads_keys], CacheBits.of(bits)
        part = chosen.bytes_per_token(model.config.plan, torch.bfloat16) / whole.plan.kv_bytes_per_token(torch.bfloat16)
        yield name, Decoder(model, cache_bits=chosen), part


def fill(decoder: Decoder, batch: int, context: int, room: int) -> None:
    """Give the decoder a cache of `context` random tokens."""
    decoder.cache, decoder.mask = allocate_cache(decoder.config, context + room, decoder.cache_bits), None
    for layer in decoder.config.plan.layers:
        shapes = [(batch, cached.num_heads, context, cached.head_dim) for cached in layer.cached]
        held = [torch.randn(shape, dtype=decoder.model.dtype) for shape in shapes]
        decoder.cache.update(held[0], held[1] if len(held) > 1 else held[0][:, :0], layer.layer)


def row(times: dict[str, list[float]], shares: dict[str, float], **where: Any) -> Iterator[dict[str, Any]]:
    """Yield what every form came to beside the first, round by round."""
    first = next(iter(times.values()))
    for name, own in times.items():
        ratios = [base / other for base, other in zip(first, own, strict=True)]
        yield {
            **where,
            "cache": name,
            "share": shares[name],
            "ms": harness.spread(own),
            "ratio": harness.spread(ratios),
        }
        print(where, name, harness.spread_text(harness.spread(ratios), 2), flush=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, list[dict[str, Any]]] = {"decode": [], "prefill": []}
    with torch.inference_mode():
        for shape in options.shape:
            made = list(decoders(shape, DTYPES[options.dtype]))
            sides, shares = {name: one for name, one, _ in made}, {name: part for name, _, part in made}
            for batch, context in CELLS:
                repetitions, token = max(2, 16 // batch), torch.zeros(batch, dtype=torch.long)
                for decoder in sides.values():
                    fill(decoder, batch, context, (options.rounds + 2) * repetitions)
                calls = {name: (lambda one=one, token=token: one.step(token)) for name, one in sides.items()}
                times = in_turns(calls, options.rounds, repetitions)  # type: ignore[arg-type]
                rows["decode"] += row(times, shares, shape=shape, batch=batch, context=context)
                for decoder in sides.values():
                    decoder.cache = None
            for length in PROMPTS:
                ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))
                calls = {name: (lambda one=one, ids=ids: one.prefill(ids, room=0)) for name, one in sides.items()}
                times = in_turns(calls, options.prompt_rounds, 1)  # type: ignore[arg-type]
                rows["prefill"] += row(times, shares, shape=shape, batch=1, context=length)
    return {"dtype": options.dtype, "threads": torch.get_num_threads(), "rounds": options.rounds, **rows}


def tables(record: dict[str, Any]) -> str:
    """Return the speeds beside the source's: a line for each form, a column for each cell."""
    shown = []
    for shape in dict.fromkeys(one["shape"] for one in record["decode"]):
        cells = [(kind, *where) for kind in ("decode", "prefill") for where in _cells(record[kind], shape)]
        heads = [f"{'prompt of' if kind == 'prefill' else f'{batch} ×'} {context:,}" for kind, batch, context in cells]
        lines = []
        for name in CACHES:
            found = [_find(record[kind], shape, name, batch, context) for kind, batch, context in cells]
            speeds = [harness.spread_text(one["ratio"], 2) for one in found]
            lines.append((name, f"{found[0]['share']:.0%}", *speeds))
        shown.append(f"{shape}, {record['dtype']}:\n\n" + harness.table(("cache", "bytes", *heads), lines))
    return "\n\n".join(shown)


def _cells(rows: list[dict[str, Any]], shape: str) -> list[tuple[int, int]]:
    return list(dict.fromkeys((one["batch"], one["context"]) for one in rows if one["shape"] == shape))


def _find(rows: list[dict[str, Any]], *of: Any) -> dict[str, Any]:
    return next(one for one in rows if tuple(one[key] for key in ("shape", "cache", "batch", "context")) == of)


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt-rounds", type=int, default=2)
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
