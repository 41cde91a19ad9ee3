"""What a finished checkpoint loses when rotary positions are taken from some frequencies of its keys and queries.

Conversions to multi-head latent attention begin with that: columns without positions can be mixed with others, and with
the values, in one latent. Nothing is saved yet here, and nothing else is changed. Kept are the highest frequencies, or
in every key head those with the largest products of query and key (MHA2MLA, Ji et al. 2025,
https://arxiv.org/abs/2502.14837, measures both).

    python benchmarks/partial_rope.py MODEL --evaluate prose book.txt --out results/real/partial-rope.json
    python benchmarks/partial_rope.py --tables results/real/partial-rope.json
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import harness
import torch
from torch import Tensor

from leanqkv.checkpoints.open import load_model, open_causal_lm
from leanqkv.convert.activations import Layers
from leanqkv.convert.conversion import calibration_tokens
from leanqkv.data.evaluation import EvaluationText, evaluation_text, unseen_split
from leanqkv.data.prepare import prepare_data
from leanqkv.errors import LeanError
from leanqkv.evaluate.paired import last_states, paired_record, spread_windows
from leanqkv.model import attention
from leanqkv.model.position import rotate
from leanqkv.report.text import signed

BATCH = 4
BY = {"frequency": "the highest", "product": "in each key head those with the largest products of query and key"}


class Kept(NamedTuple):
    """A rotation, and which frequencies of every key head it turns, [key heads, frequencies]."""

    cos: Tensor
    sin: Tensor
    kept: Tensor


def rotate_kept(heads: Tensor, rotation: Kept) -> Tensor:
    """As `rotate`, of query or key heads: those of a group turn alike."""
    turned = rotation.kept.repeat_interleave(heads.shape[1] // len(rotation.kept), 0).repeat(1, 2)
    rotated = rotate(heads, (rotation.cos, rotation.sin))
    return torch.where(turned[:, None], rotated, heads)


@contextmanager
def positions_kept(kept: Tensor) -> Iterator[None]:
    """Turn only some frequencies while the body runs; kept: [layers, key heads, frequencies], bool."""
    original = attention.rotation_of

    def rotation_of(layer: Any, rotations: Any) -> Kept:
        return Kept(*original(layer, rotations), kept[layer.layer])

    turns = patch.object(attention.Attention, "rotate", staticmethod(rotate_kept))
    with patch.object(attention, "rotation_of", rotation_of), turns:
        yield


@torch.no_grad()
def products(source: Any, tokens: Any) -> Tensor:
    """Return the mean product of the lengths of query and key, [layers, key heads, frequencies]."""
    layers, rows = Layers(source.config, source.tensors, tokens.shape[1], torch.device("cpu")), []
    stream = torch.stack(list(layers.embed(tokens)))
    for number in range(source.config.num_hidden_layers):
        block, after, total = layers.block(number), [], 0.0
        for batch in stream.split(BATCH):
            after.append(layers.run(block, number, batch))
            (recorder,) = layers.attend(block, number, batch)[1]  # all queries are one run at these lengths
            query, key = (_lengths(states) for states in (recorder.query, recorder.key))
            groups = query.unflatten(1, (key.shape[1], -1))
            total = total + (groups.mean((0, 3)) * key.mean((0, 2))[:, None]).mean(1) * len(batch)
        rows.append(total / len(stream))
        stream = torch.cat(after)
    return torch.stack(rows)


def _lengths(states: Tensor) -> Tensor:
    """Of the pairs of columns that one frequency turns: [batch, heads, length, frequencies]."""
    return states.unflatten(-1, (2, -1)).norm(dim=-2)


def keep(sizes: Tensor, count: int) -> Tensor:
    """Return where the `count` largest of each row are, bool."""
    return torch.zeros_like(sizes, dtype=torch.bool).scatter(-1, sizes.topk(count).indices, True)


def lost(model: Any, text: EvaluationText, kept: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Return the comparison of the model with itself where only some frequencies turn (see `paired_record`)."""

    def states(model: Any, ids: Tensor) -> Tensor:
        with positions_kept(kept):
            return last_states(model, ids)

    windows = spread_windows(len(text.tokens), options.length, options.evaluate_tokens // options.length)
    asked: dict[str, Any] = {"batch_size": BATCH, "states": (last_states, [states])}
    return paired_record(model, model, text, windows, options.length, **asked)


@torch.no_grad()
def measure(options: argparse.Namespace) -> harness.Record:
    source = open_causal_lm(options.source)
    config, directory = source.config, str(source.directory)
    if config.position_embedding_type != "rope" or config.rotary_head_dim != config.head_dim:
        raise LeanError("it takes a model with rotary positions on whole heads")
    data = prepare_data(options.calibration, vocab_size=config.vocab_size, tokenizer=directory)
    sizes = products(source, calibration_tokens(data, config, options.tokens, options.length))
    frequencies = sizes.shape[-1]
    model, rows = load_model(source, torch.float32), []
    texts = [
        evaluation_text(
            name,
            tokenizer=options.source,
            vocab_size=config.vocab_size,
            split=unseen_split(name, options.calibration),
        )
        for name in options.evaluate
    ]
    by = {"frequency": torch.arange(frequencies, 0, -1.0).expand(sizes.shape), "product": sizes}
    for share in options.kept:
        for name, order in by.items():
            kept = keep(order, round(share * frequencies))
            scores = [lost(model, text, kept, options) for text in texts]
            rows.append({"kept": int(kept[0, 0].sum()), "by": name, "scores": scores})
            print(f"{rows[-1]['kept']} of {frequencies} frequencies by {name}", flush=True)
    calibration = {"text": options.calibration, "tokens": options.tokens, "length": options.length}
    return {"source": options.source.name, "calibration": calibration, "frequencies": frequencies, "rows": rows}


def tables(record: harness.Record) -> str:
    """The loss above the source's, by what is kept."""
    names = [score["text"]["description"].split(",")[0] for score in record["rows"][0]["scores"]]
    rows = [
        [
            f"{row['kept']} of {record['frequencies']}, {BY[row['by']]}",
            *("{} ± {:.4f}".format(signed(lost["mean"]), lost["half_width"]) for lost in _differences(row)),
        ]
        for row in sorted(record["rows"], key=lambda row: -row["kept"])
    ]
    return harness.table(["frequencies that keep their positions", *names], rows)


def _differences(row: dict[str, Any]) -> list[dict[str, float]]:
    return [score["loss_difference"] for score in row["scores"]]


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("source", type=Path, nargs="?", help="a checkpoint directory, or a .gguf file")
    parser.add_argument("--evaluate", nargs="+", default=["prose"], metavar="TEXT")
    parser.add_argument("--evaluate-tokens", type=int, default=4096)
    parser.add_argument("--kept", type=float, nargs="+", default=[0.75, 0.5, 0.25], help="shares of the frequencies")
    parser.add_argument("--calibration", default="prose")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--length", type=int, default=512)
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
