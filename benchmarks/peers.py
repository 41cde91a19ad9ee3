"""Loss of leanqkv's latents beside three other ways to a smaller cache, each by its authors' public code.

All methods get the same weights, calibration tokens and share of the cache, and no training. Their losses are paired on
the same windows. The cache of a method is the number of columns that a layer must keep of a token, on average over the
layers.

- TransMLA (Meng et al. 2025, https://arxiv.org/abs/2502.07864): one latent of keys and values, and rotary key columns.
- Palu (Chang et al. 2024, https://arxiv.org/abs/2407.21118): latents of the keys before rotation, and of the values.
  Ranks are single columns here; its code rounds them to multiples of 32 for its kernels.
- MHA2MLA (Ji et al. 2025, https://arxiv.org/abs/2502.14837): rotary key columns, and one latent of the rest of the keys
  and the values.

The papers of TransMLA and MHA2MLA train the model afterwards; this measures the model before that training. Each peer
runs in a process of its own, on the CPU in float32. Its clone is not changed. A peer must first give the source's loss
at full rank, or it is not measured.

    git clone https://github.com/fxmeng/TransMLA
    git clone https://github.com/shadowpa0327/Palu
    git clone https://github.com/JT-Ushio/MHA2MLA
    python benchmarks/peers.py MODEL --evaluate prose book.txt --transmla TransMLA --palu Palu --mha2mla MHA2MLA \\
        --out results/real/peers.json
    python benchmarks/peers.py --tables results/real/peers.json

`--also palu=524288` calibrates a peer once more, on so many tokens, and compares it with latents that were given fewer.
What a peer gave is kept in a folder beside --out until all have; the same command goes on from there.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from peer_losses import OURS, UNROTATED, beside, compared, decoded, losses_of, windows_of
from peer_processes import CHECKED, PEERS, PROMPT, ROPE, Peer
from safetensors.torch import save_file
from torch import Tensor

from leanqkv.checkpoints.open import load_model, open_causal_lm
from leanqkv.checkpoints.tensors import finite
from leanqkv.checkpoints.write import rewrite, source_hashes, write_model
from leanqkv.commands.convert import read_share
from leanqkv.convert.conversion import calibration_tokens
from leanqkv.convert.latents import Latents
from leanqkv.convert.sweeps import Sweeps
from leanqkv.data.evaluation import EvaluationText, evaluation_text, unseen_split
from leanqkv.data.prepare import prepare_data
from leanqkv.environment import git_commit
from leanqkv.errors import LeanError
from leanqkv.files import read_json, write_json
from leanqkv.report.text import plus_minus, signed


def measure(options: argparse.Namespace) -> harness.Record:
    if options.model is None:
        raise LeanError("give the checkpoint: a directory or a .gguf file")
    clones = {name: path for name in PEERS if (path := getattr(options, name)) is not None}
    if missing := {name for name, _ in options.also} - clones.keys():
        raise LeanError(f"--also names {min(missing)}, of which there is no clone; give --{min(missing)} CLONE")
    commits = {name: commit_of(PEERS[name], path) for name, path in clones.items()}
    source = open_causal_lm(options.model)
    about = shape_of(source)
    data = prepare_data(options.calibration, vocab_size=source.config.vocab_size, tokenizer=str(source.directory))
    amounts = {*options.calibration_lengths, *(amount for _, amount in options.also)}
    tokens = {amount: calibration_tokens(data, source.config, amount, options.length) for amount in amounts}
    texts = evaluated_texts(source, options)
    windows = windows_of(texts, options.length, options.windows)
    model = load_model(source, torch.float32)
    before, expected = losses_of(model, windows), expected_losses(model, windows, about)
    del model
    given = {"source": about, "shares": options.shares, "expected": expected}
    exact = {"git_commit": git_commit(), "texts": [text.record() for text in texts], "calibration": data.record()}
    kept = None if options.out is None else options.out.with_suffix(".partial")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        rewrite(options.model, work / "source", torch.float32, stock=True)
        save_file({name: tensor.contiguous() for name, tensor in windows.items()}, work / "windows.safetensors")
        for amount, chosen in tokens.items():
            np.save(work / f"tokens-{amount}.npy", chosen)
        for name, clone in clones.items():
            lengths = [*options.calibration_lengths, *(amount for also, amount in options.also if also == name)]
            asked = {**given, "lengths": lengths, **exact, "commit": commits[name]}
            place = None if kept is None else kept / f"{name}.json"
            found[name] = earlier(place, asked) or run_peer(
                name, clone, {**given, "lengths": lengths, "work": directory}
            )
            if place is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                write_json(place, {"asked": asked, **{key: found[name][key] for key in ("rows", "checks")}})
        own = {amount: tokens[amount] for amount in options.calibration_lengths}
        rows = measure_ours(source, own, options.shares, windows, work)
    rows += [row for one in found.values() for row in one["rows"]]
    evaluated = [{**text.record(), "windows": len(losses)} for text, losses in zip(texts, before, strict=True)]
    if kept is not None:
        shutil.rmtree(kept, ignore_errors=True)
    return {
        "source": {"name": options.model.name, "sha256": source_hashes(source), **about},
        "calibration": {**data.record(), "sequence_length": options.length},
        "texts": evaluated,
        "length": options.length,
        "peers": {name: {"url": PEERS[name].url, "commit": commit} for name, commit in commits.items()},
        "checks": [check for one in found.values() for check in one["checks"]],
        "losses": before,
        "rows": compared(rows, before),
    }


def earlier(place: Path | None, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a peer gave an earlier start that asked the same; None: nothing."""
    found = read_json(place) if place is not None and place.exists() else {}
    return found if found.get("asked") == json.loads(json.dumps(asked)) else None


def commit_of(peer: Peer, clone: Path) -> str:
    """Return the commit of a clone that has what is called.

    Raises:
        LeanError: it lacks something, or differs from its commit.
    """
    for file, name in peer.needs:
        path = clone / file
        if not path.is_file() or name not in path.read_text():
            raise LeanError(f"{clone} has no {name.rstrip('(')!r} in {file}; give a clone of {peer.url}")

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(clone), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        raise LeanError(f"{clone} is no clone: git finds no commit in it; clone {peer.url}") from None
    if changed:
        raise LeanError(f"{clone} differs from its commit in {changed.split()[-1]}; clone {peer.url} anew")
    return commit


def shape_of(source: Any) -> dict[str, int]:
    """Return what peers need to know of a source that they can read.

    Raises:
        LeanError: they cannot.
    """
    config = source.config
    layers, heads, width = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    columns = config.plan.kv_bytes_per_token(torch.float32) / torch.float32.itemsize / layers
    if columns != 2 * heads * width or config.rotary_head_dim != width or width % ROPE:
        raise LeanError(f"peers read LLaMA's attention, with rotary positions and heads of a multiple of {ROPE}")
    return {"layers": layers, "heads": heads, "head_dim": width, "columns": 2 * heads * width}


def evaluated_texts(source: Any, options: argparse.Namespace) -> list[EvaluationText]:
    """Return the evaluation texts; of those that calibration reads, the part that it never sees."""
    size, texts = source.config.vocab_size, []
    for name in options.evaluate or ["prose"]:
        split = unseen_split(name, options.calibration)
        texts.append(evaluation_text(name, tokenizer=options.model, vocab_size=size, split=split))
    return texts


def expected_losses(model: Any, windows: dict[str, Tensor], about: dict[str, int]) -> dict[str, list[float]]:
    """Return the losses that peers are checked by: the source's, and those with half of the frequencies."""
    from partial_rope import positions_kept  # not above: in the process of TransMLA this name is its own file's

    first = {name: windows[name][:CHECKED] for name in ("ids.0", "targets.0")}
    frequencies = about["head_dim"] // 2
    kept = torch.arange(frequencies).expand(about["layers"], about["heads"], -1) < frequencies // 2
    with positions_kept(kept):
        half = losses_of(model, first)[0]
    return {"source": losses_of(model, first)[0], "half": half}


def run_peer(name: str, clone: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Run the process of a peer and return its rows."""
    print(f"{PEERS[name].title} ...", file=sys.stderr, flush=True)
    file = Path(about["work"], f"{name}.json")
    write_json(file, {**about, "peer": name, "clone": str(clone.resolve())})
    command = [sys.executable, str(Path(__file__).with_name("peer_processes.py")), str(file)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TQDM_DISABLE": "1"}
    code = subprocess.run(command, cwd=about["work"], env=environment).returncode
    if code:
        raise LeanError(f"the process of {PEERS[name].title} ended with exit code {code}")
    found = read_json(file)
    if "refused" in found:
        raise LeanError(found["refused"])
    return found


def measure_ours(
    source: Any, lengths: dict[int, np.ndarray], shares: Sequence[float], windows: dict[str, Tensor], work: Path
) -> list[dict[str, Any]]:
    """Return the rows of latents, the first one of each kind with what it caches in decoding."""
    from transformers import AutoModelForCausalLM

    tensors, rows = finite(source.tensors), []
    for amount, tokens in lengths.items():
        print(f"{OURS}, {amount:,} tokens ...", file=sys.stderr, flush=True)
        kinds = [(name, share) for name in (OURS, UNROTATED) for share in shares]
        made = [Latents(source.config, tensors, share, unrotated=name == UNROTATED) for name, share in kinds]
        with tempfile.TemporaryDirectory(dir=work) as directory:
            sweeps = Sweeps(source.config, tensors, tokens, Path(directory), made)
            for (name, share), found in zip(kinds, sweeps.run(), strict=True):
                out = Path(directory, f"{name}-{share}")
                write_model(source, out, found.config, found.tensors, torch.float32)
                plan = found.config.plan
                columns = plan.kv_bytes_per_token(torch.float32) / torch.float32.itemsize / len(plan.layers)
                row = {"method": name, "calibration_tokens": amount, "share": share, "columns": columns}
                rows.append({**row, "losses": losses_of(load_model(open_causal_lm(out), torch.float32), windows)})
                if share == shares[0] and amount == next(iter(lengths)):
                    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
                    rows[-1]["cached"] = decoded(model, windows["ids.0"][:1, :PROMPT])
    return rows


def tables(record: harness.Record) -> str:
    """Return what every method loses, for every number of calibration tokens, and what each caches in decoding."""
    whole = record["source"]["columns"]
    names = [text["description"].split(",")[0] for text in record["texts"]]
    sources = (f"{np.mean(one):.3f} on {name}" for name, one in zip(names, record["losses"], strict=True))
    windows = f"{record['texts'][0]['windows']} windows of {record['length']}"
    blocks = [f"Loss of the source, nats per token: {', '.join(sources)} ({windows}). Above it:"]
    headers = ["method", f"columns kept of {whole}", *(head for name in names for head in (name, f"beyond {OURS}"))]
    for amount in sorted({row["calibration_tokens"] for row in record["rows"]}):
        rows = [row for row in record["rows"] if row["calibration_tokens"] == amount]
        rows.sort(key=lambda row: -row["share"])
        own = beside(amount, record["rows"])
        blocks.append(f"Calibrated on {amount:,} tokens{f', and latents on {own:,}' if own != amount else ''}:")
        blocks.append(harness.table(headers, [cells(row, whole) for row in rows], "ll" + "r" * (2 * len(names))))
    cached = [row for row in record["rows"] if "cached" in row]
    sizes = [(row["method"], f"{row['columns']:,.1f}", f"{row['cached']:,.1f}") for row in cached]
    blocks.append(harness.table(("method", "columns to keep", "columns in `past_key_values`"), sizes, "lrr"))
    checks = [(check["what"], f"{check['difference']:.1e}") for check in record["checks"]]
    blocks.append(harness.table(("check", "largest difference of a window's loss"), checks, "lr"))
    return "\n\n".join(blocks)


def cells(row: dict[str, Any], whole: int) -> list[str]:
    """Return a row of the table of losses."""
    kept = f"{row['columns']:,.1f}".removesuffix(".0")
    found = [row["method"], f"{kept} ({row['columns'] / whole:.1%})"]
    for number, above in enumerate(row["lost"]):
        beyond = row["beyond"][number] if "beyond" in row else None
        found += [_difference(above), "" if beyond is None else _difference(beyond)]
    return found


def _difference(found: dict[str, Any]) -> str:
    return plus_minus(signed(found["mean"], 3), found["half_width"], ".3f")


def read_shares(text: str) -> list[float]:
    """Return the shares of "84%,75%"."""
    try:
        return [read_share(part, "--shares") for part in text.split(",")]
    except LeanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_also(text: str) -> tuple[str, int]:
    """Return the name and the number of "palu=524288"."""
    name, _, amount = text.partition("=")
    if name not in PEERS or not amount.isdecimal() or not int(amount):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(f'{peer}=TOKENS' for peer in PEERS)}")
    return name, int(amount)


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL", help="a checkpoint or a .gguf file")
    for name, peer in PEERS.items():
        parser.add_argument(f"--{name}", type=Path, metavar="CLONE", help=f"of {peer.url}; without it, left out")
    parser.add_argument("--evaluate", nargs="+", action="extend", metavar="TEXT", help="default: prose")
    parser.add_argument("--windows", type=int, default=16, metavar="N", help="of every text")
    parser.add_argument(
        "--shares", type=read_shares, default=[0.84, 0.75, 0.5, 0.28], help="default: 84%%,75%%,50%%,28%%"
    )
    parser.add_argument("--calibration", default="prose", metavar="TEXT")
    parser.add_argument("--calibration-lengths", type=int, nargs="+", default=[12_288], metavar="N", help="in tokens")
    parser.add_argument(
        "--also", type=read_also, nargs="+", default=[], metavar="PEER=N", help="a peer once more, with N tokens"
    )
    parser.add_argument("--length", type=int, default=512, metavar="N", help="of a sequence and a window")
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
