"""Could query heads read fewer columns of latent values? What other bases of them lose, or how much noise they add.

Values are made of a latent that mixes all heads, and every query head reads all of its columns. Three bases with fewer
to read, at the ranks that `convert --to separate-latents` chooses:

- `apart`: a latent for every head, of its own columns;
- `in order`: a head's columns hold what the heads before it do not explain, and it reads theirs and its own;
- `own`: the same latent, in a basis whose first columns are whole heads, as many as the rank has room for, and whose
  others are orthogonal to these. It loses nothing, but the other heads are then sums of larger numbers that cancel, so
  that rounding, and more so the error of codes, grows: `noise` says by how much, of the mean square over all columns.

    python benchmarks/latent_bases.py MODEL.gguf --out results/conversion/latent-bases.json
    python benchmarks/latent_bases.py --tables results/conversion/latent-bases.json
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise, permutations
from pathlib import Path

import harness
import torch
from torch import Tensor

from leanqkv.checkpoints.open import open_causal_lm
from leanqkv.checkpoints.tensors import finite
from leanqkv.checkpoints.write import source_hashes
from leanqkv.convert.conversion import calibration_tokens
from leanqkv.convert.heads import felt_output
from leanqkv.convert.latents import Latents
from leanqkv.convert.low_rank import approximate
from leanqkv.convert.sweeps import Sweeps
from leanqkv.data.prepare import prepare_data
from leanqkv.errors import LeanError

# Of the mean square of a column, what keeps a regression on columns that repeat each other solvable.
RIDGE = 1e-9


class Kept(Latents):
    """Keeps the sums of every layer."""

    grams_of_values: list[Tensor]

    def choose(self, measured: Callable[[int], Mapping[str, Tensor]]) -> None:
        self.grams_of_values = [measured(layer)["gram"] for layer in range(self.config.num_hidden_layers)]
        super().choose(measured)


def weights_of(output: Tensor) -> Tensor:
    """What an error of each head's values costs, [heads, head_dim, head_dim], of W_O as `felt_output` gives it."""
    return torch.einsum("hgkd,hgld->hkl", output, output)


def missed(gram: Tensor, weight: Tensor, rank: int) -> float:
    """What the best latent of all heads together misses of attention's output, squared and summed."""
    return float(approximate(gram, weight)[2][rank:].sum())


def missed_apart(gram: Tensor, weight: Tensor, rank: int) -> float:
    """The same of a latent for every head, where the best columns of all heads are taken."""
    gains = [approximate(block, own[None])[2] for block, own in zip(_blocks(gram, len(weight)), weight, strict=True)]
    return float(torch.cat(gains).sort(descending=True).values[rank:].sum())


def missed_in_order(gram: Tensor, weight: Tensor, rank: int) -> float:
    """The same where a head reads the columns of those before it as well; of the best order of heads."""
    return min(_missed_by(gram, weight, rank, order) for order in permutations(range(len(weight))))


def _missed_by(gram: Tensor, weight: Tensor, rank: int, order: Sequence[int]) -> float:
    """How many columns each head has is what it gains beyond the whole heads before it."""
    size, pool = weight.shape[1], []
    for place, head in enumerate(order):
        before = torch.tensor([h * size + d for h in order[:place] for d in range(size)], dtype=torch.long)
        own = torch.arange(head * size, (head + 1) * size)
        rest = gram[own][:, own]
        if len(before):
            squares = gram[before][:, before]
            squares.diagonal().add_(RIDGE * squares.diagonal().mean())
            rest = rest - gram[own][:, before] @ torch.linalg.solve(squares, gram[before][:, own])
        pool.append(approximate((rest + rest.T) / 2, weight[head][None])[2])
    taken = torch.cat(pool).argsort(descending=True)[:rank] // size
    latent, error = torch.zeros(len(gram), 0, dtype=gram.dtype), 0.0
    for place, head in enumerate(order):
        values = torch.zeros(len(gram), size, dtype=gram.dtype)
        values[head * size : (head + 1) * size] = torch.eye(size, dtype=gram.dtype)
        if latent.shape[1]:
            squares = latent.T @ gram @ latent
            squares.diagonal().add_(RIDGE * squares.diagonal().mean())
            values = values - latent @ torch.linalg.solve(squares, latent.T @ gram @ values)
        rest, count = values.T @ gram @ values, int((taken == place).sum())
        combine, _, gains = approximate((rest + rest.T) / 2, weight[head][None])
        error += float(gains[count:].sum())
        latent = torch.cat((latent, values @ combine[:, :count]), dim=1)
    return error


def own_columns(gram: Tensor, weight: Tensor, rank: int) -> list[dict[str, float]]:
    """For every number of whole heads that the rank has room for: columns that all heads read together, and the noise."""
    heads, size, _ = weight.shape
    combine, restore, _ = approximate(gram, weight)
    variance = torch.linalg.cholesky(combine[:, :rank].T @ gram @ combine[:, :rank])
    rows = restore[:rank].T @ variance  # the values of a latent whose columns are uncorrelated and of one size
    found = []
    for count in range(min(heads - 1, rank // size) + 1):
        noise = min(_noise(rows, kept, size) for kept in combinations(range(heads), count))
        found.append({"heads": count, "columns": count * size + (heads - count) * rank, "noise": noise})
    return found


def _noise(rows: Tensor, kept: Sequence[int], head_dim: int) -> float:
    """The mean square that an error of a column's size in every column leaves in a value, of the value's size."""
    basis = torch.eye(rows.shape[1], dtype=rows.dtype)
    if kept:
        own = torch.cat([rows[head * head_dim : (head + 1) * head_dim] for head in kept])
        basis = torch.cat((own, torch.linalg.qr(own.T, mode="complete").Q[:, len(own) :].T))
    scaled = basis / basis.norm(dim=1, keepdim=True)
    made = torch.linalg.solve(scaled.T, rows.T).T
    return float((made.square().sum(1) / rows.square().sum(1)).mean())


def _blocks(gram: Tensor, heads: int) -> list[Tensor]:
    edges = range(0, len(gram) + 1, len(gram) // heads)
    return [gram[start:stop, start:stop] for start, stop in pairwise(edges)]


def measure(options: argparse.Namespace) -> harness.Record:
    if options.source is None:
        raise LeanError("give a checkpoint directory or a .gguf file")
    source = open_causal_lm(options.source)
    config, tensors = source.config, finite(source.tensors)
    data = prepare_data(options.calibration, vocab_size=config.vocab_size, tokenizer=str(source.directory))
    tokens = calibration_tokens(data, config, options.tokens, options.length)
    reduction = Kept(config, tensors, options.share, separate=True)
    with tempfile.TemporaryDirectory() as directory:
        Sweeps(config, tensors, tokens, Path(directory), [reduction]).run()
    rows = []
    for layer, rank in enumerate(reduction.ranks):
        if rank == reduction.width:
            continue
        gram, weight = reduction.grams_of_values[layer], weights_of(felt_output(config, tensors, layer))
        if len(gram) != reduction.width:
            raise LeanError("values are wider than this model's stream: their sums are of the stream's columns")
        best = missed(gram, weight, rank)
        rows.append(
            {
                "layer": layer,
                "rank": rank,
                "apart": missed_apart(gram, weight, rank) / best,
                "in_order": missed_in_order(gram, weight, rank) / best,
                "own": own_columns(gram, weight, rank),
            }
        )
    about = {"source": options.source.name, "sha256": source_hashes(source), "cache": options.share}
    calibration = {**data.record(), "tokens": tokens.size, "sequence_length": options.length}
    return {**about, "width": reduction.width, "calibration": calibration, "rows": rows}


def tables(record: harness.Record) -> str:
    """Return what the bases lose, and what their columns and their noise are."""
    rows = record["rows"]
    cells = [
        [name, *(harness.spread_text(harness.spread([row[key] for row in rows]), 2),)]
        for name, key in (("a latent for each head", "apart"), ("heads in order", "in_order"))
    ]
    losses = harness.table(["latents", "squared error, of that of one latent for all heads"], cells, "lr")
    cells = []
    for heads in range(max(len(row["own"]) for row in rows)):
        own = [(row["own"][heads], row) for row in rows if len(row["own"]) > heads]
        read = [one["columns"] / record["width"] for one, _ in own]
        noise = [one["noise"] for one, _ in own]
        cells.append([str(heads), str(len(own)), *(harness.spread_text(harness.spread(of), 2) for of in (read, noise))])
    headers = ["whole heads", "layers with room", "columns read, of those of heads", "noise"]
    return losses + "\n\n" + harness.table(headers, cells, "rrrr")


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("source", type=Path, nargs="?", metavar="MODEL", help="a checkpoint or a .gguf file")
    parser.add_argument("--share", type=float, default=0.84, help="of the cache")
    parser.add_argument("--calibration", default="prose", metavar="TEXT")
    parser.add_argument("--tokens", type=int, default=12_288, metavar="N", help="to calibrate on")
    parser.add_argument("--length", type=int, default=512, metavar="N", help="of a sequence")
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
