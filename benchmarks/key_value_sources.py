"""What is lost, layer by layer, when a layer's values or keys are made of something else: what bounds a frontier.

For every layer of a finished checkpoint, on the source's own stream: latents of several ranks, alone and beside the
keys; merged value heads; value heads borrowed from the first layer (SkipV1Former, YOCO) and from the layer below
(CLA); and output matrices of every query head that read the latent freely. In each case W_O is fitted again, as the
conversions fit it, and the error is the share of the output's squares that is missed on tokens held out from the fit.

Keys: made of those of the layer below, or of a latent, by factors that rotary positions allow, one complex matrix over
the heads for each frequency. The error is the share of the keys' squares that is missed on the same held-out tokens,
weighted by the queries' squares in that frequency.

The stream of all tokens and one layer's attention patterns are held in memory.

    python benchmarks/key_value_sources.py MODEL --out results/real/key-value-sources.json
    python benchmarks/key_value_sources.py --tables results/real/key-value-sources.json
"""

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch
from torch import Tensor

from leanqkv.checkpoints.open import open_causal_lm
from leanqkv.convert.activations import Layers, Recorder
from leanqkv.convert.conversion import calibration_tokens
from leanqkv.convert.heads import check_convertible, split_heads
from leanqkv.convert.latent_values import ValueGram, value_latents, value_width
from leanqkv.convert.merged_values import PairGrams, fit_pair
from leanqkv.convert.output_fit import Fit, fit_output, token_weights
from leanqkv.convert.sweeps import HELD_OUT
from leanqkv.data.prepare import prepare_data

BATCH = 4
WORDS = {
    "latent": "latent of {columns} columns",
    "keys": "latent of {columns} columns, and the keys",
    "free": "latent of {columns} columns, free output matrices",
    "merged": "two heads merged",
    "first": "a head of the first layer",
    "below": "a head of the layer below",
    "only keys": "the keys alone",
    "only first": "heads of the first layer alone",
    "only below": "heads of the layer below alone",
    "key latent": "latent of {columns} columns",
    "key below": "the keys of the layer below",
}


@dataclass(frozen=True)
class Seen:
    """A batch in one layer: its attention, the weight of each token's error, and the sequences that are held out."""

    recorder: Recorder
    weight: Tensor
    held: Tensor

    def attended(self, values: Tensor) -> Tensor:
        """Each query head's patterns times its key head's values [batch, heads, length, columns]: [batch, length, query
        heads, columns]."""
        grouped = self.recorder.patterns.unflatten(1, (values.shape[1], -1))
        return (grouped @ values[:, :, None]).flatten(1, 2).transpose(1, 2)


class Layer:
    """One layer on all tokens.

    Args:
        output: W_O, [query heads * head_dim, hidden_size], in float64.
    """

    def __init__(self, seen: list[Seen], output: Tensor):
        self.seen, self.output = seen, output

    @property
    def held(self) -> Tensor:
        """Which tokens, of all batches, are held out."""
        return torch.cat([one.held.repeat_interleave(one.weight.shape[1]) for one in self.seen])

    def missed(self, values: Callable[[Seen], Tensor], start: Tensor) -> float:
        """Return the share of the output's squares that is missed with other values.

        Args:
            values: [batch, key heads, length, columns] of a batch.
            start: [query heads * columns, hidden_size], the W_O to which the fit is pulled.
        """
        fitted, held_out = Fit(), Fit()
        for one in self.seen:
            features = one.attended(values(one)).flatten(2) * one.weight[..., None]
            target = one.recorder.heads.flatten(2) @ self.output.float() * one.weight[..., None]
            for fit, rows in ((fitted, ~one.held), (held_out, one.held)):
                fit.add(features[rows].flatten(0, 1), target[rows].flatten(0, 1))
        return fit_output(fitted, held_out, start)[2]

    def sums(self, one: Any) -> Any:
        """Add all batches to `Grams` and return them."""
        for seen in self.seen:
            one.add(seen.recorder, seen.weight)
        return one


def measure_layer(layer: Layer, heads: Any, lenders: dict[str, list[Tensor]], ranks: list[int]) -> dict[str, float]:
    """Return what is missed, by kind of values.

    Args:
        heads: the layer's `ValueHeads`.
        lenders: values that could be borrowed, [batch, heads, length, head_dim] of every batch, by the lender's name.
        ranks: of the latents.
    """
    output = heads.output.mT  # [key heads, group, head_dim, hidden_size]
    width = output.shape[0] * output.shape[2]
    alone = value_latents(layer.sums(ValueGram(width, None)).total, output)
    both = value_latents(layer.sums(ValueGram(width, None, width)).total, output)
    found = {}
    for rank in ranks:
        found[f"latent {rank}"] = layer.missed(_latent(alone, rank), layer.output)
        found[f"keys {rank}"] = layer.missed(_latent(both, rank), layer.output)
    restore = alone.restore[: ranks[-1]].unflatten(1, (len(output), -1)).transpose(0, 1)  # [key heads, rank, head_dim]
    free = (restore[:, None] @ output).flatten(0, 2)
    found[f"free {ranks[-1]}"] = layer.missed(
        lambda seen: (_columns(seen) @ alone.combine[:, : ranks[-1]].float())[:, None].expand(-1, len(output), -1, -1),
        free,
    )
    found["only keys"] = layer.missed(_latent(both, 0), layer.output)
    found["merged"] = layer.missed(*_merged(layer, output))
    for name, values in lenders.items():
        found |= _borrowed(layer, output, name, values)
    return found


def _columns(seen: Seen) -> Tensor:
    return seen.recorder.values.transpose(1, 2).flatten(2)


def _latent(found: Any, rank: int) -> Callable[[Seen], Tensor]:
    """Value heads made of a latent and, where they have a part in it, of the keys."""
    from_keys, through = found.from_keys.float(), (found.combine[:, :rank] @ found.restore[:rank]).float()

    def values(seen: Seen) -> Tensor:
        columns = _columns(seen)
        by_keys = seen.recorder.projected_key @ from_keys if len(from_keys) else torch.zeros_like(columns)
        made = (columns - by_keys) @ through + by_keys
        return made.unflatten(-1, (seen.recorder.values.shape[1], -1)).transpose(1, 2)

    return values


def _merged(layer: Layer, output: Tensor) -> tuple[Callable[[Seen], Tensor], Tensor]:
    """The value heads with the cheapest pair merged, and the W_O that restores both."""
    count, width = output.shape[0], output.shape[2]
    grams = layer.sums(PairGrams(count, width))
    weights = torch.einsum("hgkd,hgld->hkl", output, output)
    pairs = [
        fit_pair(grams.of_pair(*pair), torch.block_diag(weights[pair[0]], weights[pair[1]]), 0, pair, 1.0)
        for pair in product(range(count), repeat=2)
        if pair[0] < pair[1]
    ]
    best = min(pairs, key=lambda pair: pair.cost)
    first, second = best.heads
    start = output.clone()
    start[first] = best.restore[:, :width] @ output[first]
    start[second] = best.restore[:, width:] @ output[second]

    def values(seen: Seen) -> Tensor:
        own = seen.recorder.values.clone()
        own[:, first] = own[:, second] = torch.cat((own[:, first], own[:, second]), -1) @ best.combine.float()
        return own

    return values, start.flatten(0, 2)


def _borrowed(layer: Layer, output: Tensor, name: str, lent: list[Tensor]) -> dict[str, float]:
    """What is missed where the one value head that loses least is borrowed, and where all are."""
    count = len(output)
    places = {id(seen): values for seen, values in zip(layer.seen, lent, strict=True)}
    maps = {pair: _map(layer, output, lent, *pair) for pair in product(range(count), range(lent[0].shape[1]))}
    best = {head: min((maps[pair][0], pair[1]) for pair in maps if pair[0] == head)[1] for head in range(count)}

    def missed(borrowed: list[int]) -> float:
        start = output.clone()
        for head in borrowed:
            start[head] = maps[head, best[head]][1] @ output[head]

        def values(seen: Seen) -> Tensor:
            own = seen.recorder.values.clone()
            for head in borrowed:
                own[:, head] = places[id(seen)][:, best[head]]
            return own

        return layer.missed(values, start.flatten(0, 2))

    return {name: min(missed([head]) for head in range(count)), f"only {name}": missed(list(range(count)))}


def _map(layer: Layer, output: Tensor, lent: list[Tensor], head: int, lender: int) -> tuple[float, Tensor]:
    """The map of a lent head to a layer's own under its patterns, [head_dim, head_dim], and the error of the output."""
    gram: Any = 0.0
    for seen, values in zip(layer.seen, lent, strict=True):
        patterns = seen.recorder.patterns.unflatten(1, (len(output), -1))[:, head]
        columns = torch.cat((seen.recorder.values[:, head], values[:, lender]), -1)
        attended = (patterns @ columns[:, None] * seen.weight[:, None, :, None]).flatten(0, 2)
        gram = gram + (attended.T @ attended).double()
    width = output.shape[2]
    own, both, other = gram[:width, :width], gram[width:, :width], gram[width:, width:]
    pull = 1e-6 * other.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    made = torch.linalg.solve(other + pull, both)
    rest = own - both.T @ made
    return float(torch.einsum("kl,gkd,gld->", rest, output[head], output[head])), made


def measure_keys(layer: Layer, below: list[Tensor], columns: list[int]) -> dict[str, float]:
    """Return what is missed of the keys of a layer with rotary positions on whole heads, by what they are made of.

    Args:
        below: keys of the layer below, as `k_proj` makes them, [batch, length, width] of every batch; none: nothing is
            made of them.
        columns: of the latents.
    """
    heads = layer.seen[0].recorder.key.shape[1]
    own, held = _complex([seen.recorder.projected_key for seen in layer.seen], heads), layer.held
    energy = sum(_energy(seen.recorder.query, heads) for seen in layer.seen)  # [frequencies, heads]
    own = own * energy.sqrt()[:, None]  # [frequencies, tokens, heads]
    total = float(own[:, held].abs().square().sum())
    found = {}
    gram = own[:, ~held].mH @ own[:, ~held]
    sizes, vectors = torch.linalg.eigh(gram)  # ascending
    for count in columns:
        kept = sizes.flatten().argsort(descending=True)[: count // 2]
        mask = torch.zeros(sizes.numel(), dtype=torch.bool).scatter(0, kept, True).view_as(sizes)
        inside = (own[:, held] @ vectors).abs().square() * mask[:, None]
        found[f"key latent {count}"] = 1 - float(inside.sum()) / total
    if below:
        lent = _complex(below, heads)
        square = lent[:, ~held].mH @ lent[:, ~held]
        pull = 1e-6 * square.diagonal(dim1=1, dim2=2).real.mean(-1)[:, None, None] * torch.eye(heads)
        made = torch.linalg.solve(square + pull, lent[:, ~held].mH @ own[:, ~held])
        found["key below"] = float((own[:, held] - lent[:, held] @ made).abs().square().sum()) / total
    return found


def _complex(keys: list[Tensor], heads: int) -> Tensor:
    """The pairs of columns that a frequency turns as complex numbers, [frequencies, tokens, heads]."""
    pairs = torch.cat([one.flatten(0, 1) for one in keys]).unflatten(-1, (heads, 2, -1)).double()
    return torch.complex(pairs[:, :, 0], pairs[:, :, 1]).permute(2, 0, 1)


def _energy(query: Tensor, heads: int) -> Tensor:
    """Sum of the queries' squares by frequency and key head, [frequencies, heads]."""
    pairs = query.double().unflatten(1, (heads, -1)).unflatten(-1, (2, -1))
    return pairs.square().sum((0, 2, 3, 4)).T


def layers_seen(options: argparse.Namespace) -> Iterator[tuple[int, Layer, Any, dict[str, list[Tensor]], list[Tensor]]]:
    """Yield every layer's number, what is seen of it, its value heads, values to borrow, and the keys below."""
    source = open_causal_lm(options.source)
    check_convertible(source.config)
    data = prepare_data(options.calibration, vocab_size=source.config.vocab_size, tokenizer=str(source.directory))
    tokens = calibration_tokens(data, source.config, options.tokens, options.length)
    layers = Layers(source.config, source.tensors, options.length, torch.device("cpu"))
    stream = torch.stack(list(layers.embed(tokens)))
    held = torch.arange(len(tokens)) % HELD_OUT == HELD_OUT - 1
    first: list[Tensor] = []
    below: list[Tensor] = []
    keys_below: list[Tensor] = []
    for number in range(source.config.num_hidden_layers):
        block, seen, after = layers.block(number), [], []
        for start in range(0, len(stream), BATCH):
            batch = stream[start : start + BATCH]
            after.append(layers.run(block, number, batch))
            (recorder,) = layers.attend(block, number, batch)[1]  # all queries are one run at these lengths
            weight, _ = token_weights(batch, source.config.norm_eps)
            seen.append(Seen(recorder, weight, held[start : start + BATCH]))
        heads = split_heads(source.config, source.tensors, number)
        lenders = {"first": first, "below": below} if number else {}
        yield number, Layer(seen, heads.output.mT.flatten(0, 2)), heads, lenders, keys_below
        below = [one.recorder.values for one in seen]
        keys_below = [one.recorder.projected_key for one in seen]
        first = first or below
        stream = torch.cat(after)


@torch.no_grad()
def measure(options: argparse.Namespace) -> harness.Record:
    config = open_causal_lm(options.source).config
    width = value_width(config)
    # Without one head, a latent may take as many columns as the heads that are left.
    ranks = [width // 4, width // 2, width - config.head_dim]
    rows = []
    rotary = config.position_embedding_type == "rope" and config.rotary_head_dim == config.head_dim
    for number, layer, heads, lenders, keys_below in layers_seen(options):
        missed = measure_layer(layer, heads, lenders, ranks)
        if rotary and not config.qk_norm:
            missed |= measure_keys(layer, keys_below, ranks)
        rows.append({"layer": number, "missed": missed})
        print(f"layer {number + 1} of {config.num_hidden_layers}", flush=True)
    return {
        "source": options.source.name,
        "calibration": {"text": options.calibration, "tokens": options.tokens, "length": options.length},
        "threads": int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())),
        "width": width,
        "head_dim": config.head_dim,
        "layers": rows,
    }


def tables(record: harness.Record) -> str:
    """The least, the median and the most of all layers but the first, which can borrow nothing."""
    layers = [row["missed"] for row in record["layers"]][1:]
    blocks = []
    for kind in ("values", "keys"):
        names = [name for name in layers[0] if name.startswith("key ") == (kind == "keys")]
        rows = []
        for name in sorted(names, key=lambda name: (_cached(name, record), median(row[name] for row in layers))):
            shares = sorted(row[name] for row in layers)
            figures = [f"{100 * share:.1f}%" for share in (median(shares), shares[0], shares[-1])]
            rows.append([_words(name), str(_cached(name, record)), *figures])
        headers = [f"{kind} are made of", "columns cached for them", "missed, median", "least", "most"]
        blocks += [harness.table(headers, rows)] if rows else []
    return "\n\n".join(blocks)


def _words(name: str) -> str:
    if name in WORDS:
        return WORDS[name]
    kind, _, columns = name.rpartition(" ")
    return WORDS[kind].format(columns=columns)


def _cached(name: str, record: harness.Record) -> int:
    columns = name.rpartition(" ")[2]
    if columns.isdecimal():
        return int(columns)
    return 0 if name.startswith(("only", "key")) else record["width"] - record["head_dim"]


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("source", type=Path, nargs="?", help="a checkpoint directory, or a .gguf file")
    parser.add_argument("--calibration", default="prose")
    parser.add_argument("--tokens", type=int, default=12_288)
    parser.add_argument("--length", type=int, default=512)
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
