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
"""

import argparse
import copy
import importlib
import inspect
import io
import itertools
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stdout
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import harness
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leanqkv.checkpoints.open import load_model, open_causal_lm
from leanqkv.checkpoints.tensors import finite
from leanqkv.checkpoints.write import rewrite, source_hashes, write_model
from leanqkv.commands.convert import read_share
from leanqkv.convert.conversion import calibration_tokens
from leanqkv.convert.latents import Latents
from leanqkv.convert.sweeps import Sweeps
from leanqkv.data.batches import IGNORED, collate
from leanqkv.data.evaluation import EvaluationText, evaluation_text, unseen_split
from leanqkv.data.prepare import prepare_data
from leanqkv.errors import LeanError
from leanqkv.evaluate.paired import mean_over_windows, spread_windows
from leanqkv.files import read_json, write_json
from leanqkv.model.cache import cached_tensors
from leanqkv.report.text import plus_minus, signed

OURS = "leanqkv latents"
BATCH = 4  # calibration sequences at a time
CHECKED = 2  # windows of the first text that a peer is checked on
ROUNDING = 2e-5  # nats, of a window's mean loss in float32; on SmolLM2-135M all agree to 1e-6
PROMPT, DECODED = 56, 8  # tokens
ROPE, FOLDED = 64, 2  # TransMLA: columns that keep their positions, and frequencies that count as one
Losses = list[list[float]]  # of every text and window, nats per token


# --- what is kept, and what is lost -----------------------------------------------------------------------------------


def columns_for(share: float, source: int, parts: int = 1) -> int:
    """Return the most columns of `parts` layers that are within the share of the source's, so many in each."""
    return math.floor(share * source * parts + 1e-6)


def joint_rank(columns: int, kept: int, heads: int) -> int:
    """Return MHA2MLA's rank for each of so many key heads, which keep `kept` columns of keys in all; 0: too few."""
    return max(0, (columns - kept) // heads)


def group_of(heads: int) -> int:
    """Return how many key heads Palu takes together: as many of up to four, its own number, as divide all."""
    return max(size for size in range(1, 5) if heads % size == 0)


def lost(losses: Losses, before: Losses) -> list[dict[str, float | None]]:
    """Return by how much the windows' losses are above others of the same windows, for every text."""
    pairs = zip(losses, before, strict=True)
    differences = [torch.tensor(one, dtype=torch.float64) - torch.tensor(other) for one, other in pairs]
    return [mean_over_windows(found, torch.arange(len(found))) for found in differences]


def compared(rows: Sequence[dict[str, Any]], source: Losses) -> list[dict[str, Any]]:
    """Return the rows with what each loses, and what it loses beyond latents of its share and calibration."""
    ours = {(row["calibration_tokens"], row["share"]): row["losses"] for row in rows if row["method"] == OURS}
    found = []
    for row in rows:
        beside = ours.get((row["calibration_tokens"], row["share"]))
        one = {key: value for key, value in row.items() if key != "losses"} | {"lost": lost(row["losses"], source)}
        beyond = {} if row["method"] == OURS or beside is None else {"beyond": lost(row["losses"], beside)}
        found.append({**one, **beyond, "losses": row["losses"]})
    return found


@torch.no_grad()
def losses_of(model: Any, windows: dict[str, Tensor]) -> Losses:
    """Return the loss of every window that `windows_of` returns."""
    found = []
    for number in range(len(windows) // 2):
        pairs = zip(windows[f"ids.{number}"], windows[f"targets.{number}"], strict=True)
        found.append([_loss(model, ids, wanted) for ids, wanted in pairs])
    return found


def _loss(model: Any, ids: Tensor, wanted: Tensor) -> float:
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    return torch.nn.functional.cross_entropy(logits, wanted, ignore_index=IGNORED).item()


def windows_of(texts: Sequence[EvaluationText], length: int, count: int) -> dict[str, Tensor]:
    """Return inputs and targets of every text's windows, [windows, length]."""
    found = {}
    for number, text in enumerate(texts):
        starts = [start for start, _ in spread_windows(len(text.tokens), length, count)]
        batch = collate(text.tokens, starts, min(length, len(text.tokens) - 1))
        found |= {f"ids.{number}": batch["input_ids"], f"targets.{number}": batch["shift_labels"]}
    return found


@torch.no_grad()
def decoded(model: Any, ids: Tensor) -> float:
    """Return the columns of a token that `past_key_values` holds a layer after generating from ids, [1, length]."""
    options: dict[str, Any] = {"max_new_tokens": DECODED, "min_new_tokens": DECODED, "do_sample": False}
    found = model.generate(ids, return_dict_in_generate=True, **options)
    again = model.generate(ids, use_cache=False, **options)
    if not torch.equal(found.sequences, again):
        raise LeanError("decoding with a cache gives other tokens than without")
    cache = found.past_key_values
    layers = [sum(tensor.nbytes for tensor in cached_tensors(layer)) for layer in cache.layers]
    return sum(layers) / len(layers) / cache.get_seq_length() / torch.float32.itemsize


# --- in the process of a peer -----------------------------------------------------------------------------------------


class Job:
    """What the process of a peer is given, and the rows that it returns."""

    def __init__(self, about: dict[str, Any]):
        self.work, self.clone, self.source = Path(about["work"]), Path(about["clone"]), about["source"]
        self.shares, self.lengths, self.expected = about["shares"], about["lengths"], about["expected"]
        self.windows = load_file(self.work / "windows.safetensors")
        self.rows: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []

    def model(self) -> Any:
        """Return the source, as transformers loads it."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.work / "source", dtype=torch.float32).eval()

    def tokens(self, amount: int) -> Tensor:
        """Return the calibration tokens, [sequences, length]."""
        return torch.from_numpy(np.load(self.work / f"tokens-{amount}.npy"))

    def checked(self, model: Any) -> list[float]:
        """Return the losses of the windows for checks."""
        first = {name: self.windows[name][:CHECKED] for name in ("ids.0", "targets.0")}
        return losses_of(model, first)[0]

    def check(self, what: str, found: list[float], expected: list[float]) -> None:
        """Compare losses that are equal but for rounding.

        Raises:
            LeanError: they differ.
        """
        difference = float(np.abs(np.subtract(found, expected)).max())
        self.checks.append({"what": what, "difference": difference})
        if not difference < ROUNDING:
            raise LeanError(f"{what}: a window's loss differs by {difference:.2g} nats; this code may be another one")

    def keep(self, method: str, amount: int, share: float, columns: float, model: Any) -> None:
        """Score a model and keep its row.

        Raises:
            LeanError: it keeps more than its share.
        """
        if columns > share * self.source["columns"] + 1e-6:
            raise LeanError(f"{method} keeps {columns:,.1f} columns, more than {share:.0%} of the source's")
        row = {"method": method, "calibration_tokens": amount, "share": share, "columns": columns}
        self.rows.append({**row, "losses": losses_of(model.eval(), self.windows)})
        print(f"{method}, {share:.0%}", file=sys.stderr, flush=True)

    def decode(self, make: Callable[[], Any]) -> None:
        """Count what the model of the last row caches in decoding, once for a peer."""
        if not any("cached" in row for row in self.rows):
            self.rows[-1]["cached"] = decoded(make(), self.windows["ids.0"][:1, :PROMPT])


def batches(tokens: Tensor, size: int) -> list[dict[str, Tensor]]:
    """Return calibration tokens as a loader of peers gives them."""
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in tokens.split(size)]


def stand_in(name: str, **attributes: Any) -> None:
    """Let `import name` find what does nothing."""
    module = MagicMock(name=name, **attributes)
    module.__spec__, module.__path__ = ModuleSpec(name, None), []
    sys.modules[name] = module


def on_cpu() -> None:
    """Let code that names CUDA run on the CPU."""

    def stay(original: Callable) -> Callable:
        return lambda self, *where, **more: original(self, *("cpu" if one == "cuda" else one for one in where), **more)

    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.to = stay(torch.Tensor.to)
    torch.nn.Module.to = stay(torch.nn.Module.to)


def calls_like_then(attention: type) -> Callable:
    """Return the forward method of a class for older versions of transformers, which takes what they give it now."""
    original = attention.forward
    known = inspect.signature(original).parameters

    def forward(self: Any, *states: Any, **given: Any) -> Any:
        given["past_key_value"] = given.pop("past_key_values", None)
        return original(self, *states, **{name: value for name, value in given.items() if name in known})

    return forward


def run_transmla(job: Job) -> None:
    """Fold rotary positions into 64 columns, and make a latent of the rest."""
    sys.path.insert(0, str(job.clone / "transmla" / "transmla"))
    partial_rope, lora = importlib.import_module("partial_rope"), importlib.import_module("lora_qkv")
    partial_rope.PartialRope.forward = calls_like_then(partial_rope.PartialRope)
    lora.LoraQKV.forward = calls_like_then(lora.LoraQKV)
    heads, collapse = job.source["heads"], job.source["head_dim"] // ROPE
    width = heads * job.source["head_dim"]
    options = {"q_lora_rank": None, "qk_mqa_dim": ROPE, "balance_kv_ratio": 1, "use_qkv_norm": False}
    options |= {"freqfold": FOLDED, "collapse": collapse}
    for amount in job.lengths:
        loader = batches(job.tokens(amount), BATCH)
        if not job.checks:
            whole = job.model()
            seen = partial_rope.get_qkv_calibrate_outputs(whole, loader[:1])
            for number, layer in enumerate(whole.model.layers):
                turned = {"freqfold": 1, "rope_head": heads, "collapse": 1}
                layer.self_attn = partial_rope.PartialRope(layer.self_attn, seen["key"][number], **turned)
            job.check("TransMLA with positions on all columns", job.checked(whole), job.expected["source"])
        turned = partial_rope.partial_rope(job.model(), None, loader, None, **options)
        for share in (1.0, *job.shares):
            rank = columns_for(share, job.source["columns"]) - ROPE
            if rank < 1:
                continue
            model = lora.low_rank_qkv(copy.deepcopy(turned), None, loader, None, kv_lora_rank=rank, **options)
            if rank == 2 * width - ROPE and amount == job.lengths[0]:
                found = job.checked(model)
                job.check("TransMLA's latent of all other columns", found, job.checked(turned))
            columns = max(layer.self_attn.kv_a_proj_with_mqa.out_features for layer in model.model.layers)
            job.keep("TransMLA", amount, share, columns, model)
            if share < 1:
                job.decode(partial(with_transmla_cache, job, model))


def with_transmla_cache(job: Job, model: Any) -> Any:
    """Return the model with the class of attention that TransMLA's converter saves it with."""
    from transformers.models.gemma2 import modeling_gemma2

    modeling_gemma2.logger = logging.getLogger()  # imported, and called in no case of these
    sys.path.insert(0, str(job.clone / "transmla" / "transmla" / "transformers"))
    attention = importlib.import_module("mla").MLAAttention
    attention.forward = calls_like_then(attention)
    config = copy.deepcopy(model.config)
    made = model.model.layers[0].self_attn
    config.rope_theta, config.num_key_value_heads = None, config.num_attention_heads  # as modify_config says
    config.q_lora_rank, config.kv_lora_rank, config.qk_latent_layernorm = None, made.kv_lora_rank, False
    config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim = ROPE, made.head_dim, made.head_dim
    config.qk_head_dim = ROPE + made.head_dim
    found = copy.deepcopy(model)
    for number, layer in enumerate(found.model.layers):
        states = layer.self_attn.state_dict()
        layer.self_attn = attention(config, number)
        layer.self_attn.load_state_dict(states)
    return found.eval()


def run_palu(job: Job) -> None:
    """Make latents of whitened keys and values, of equal ranks and of ranks by Fisher information."""
    for name in ("loguru", "click", "datasets", "fast_hadamard_transform"):
        stand_in(name)
    sys.path.insert(0, str(job.clone))
    search, decomposition = importlib.import_module("palu.rank_search"), importlib.import_module("palu.decomposition")
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    original, rotary = LlamaDecoderLayer.forward, job.model().model.rotary_emb

    def forward(self: Any, states: Tensor, **given: Any) -> Tensor:
        if given.get("position_embeddings") is None:
            given["position_embeddings"] = rotary(states, given["position_ids"])
        return original(self, states, **given)

    LlamaDecoderLayer.forward = forward
    search.rounding_search_result = partial(search.rounding_search_result, block_size=1)
    for amount in job.lengths:
        with tempfile.TemporaryDirectory() as directory, chdir(directory):
            Path("cache").mkdir()  # it keeps there what it measures, for the next shares
            palu_of(search, decomposition, job, amount)


def palu_of(search: Any, decomposition: Any, job: Job, amount: int) -> None:
    """Measure Palu, calibrated on so many tokens."""
    tokens = job.tokens(amount)
    loader = batches(tokens, 1)
    search.get_calib_data = decomposition.get_calib_data = lambda *_, **__: loader
    # It makes room for inputs of 2,048 tokens, and these are sequences of another length.
    zeros = lambda shape, **more: torch.zeros((shape[0], tokens.shape[1], shape[2]), **more)  # noqa: E731
    decomposition.torch = SimpleNamespace(**{**vars(torch), "zeros": zeros})
    methods = {"fisher_uniform": "Palu, ranks by Fisher information", "uniform": "Palu, equal ranks"}
    ways = [(1.0, "uniform")] if not job.checks else []
    for share, method in (*ways, *itertools.product(job.shares, methods)):
        model = job.model()
        ranks, args = palu_ranks(search, model, method, share, job)
        decomposition.compress_model(model, None, args, "cpu", ranks)
        if share == 1:
            job.check("Palu's latents of all columns", job.checked(model), job.expected["source"])
            continue
        made = [(layer.self_attn.k_proj, layer.self_attn.v_proj) for layer in model.model.layers]
        columns = sum(sum(part.ranks) for pair in made for part in pair) / len(made)
        job.keep(methods[method], amount, share, columns, model)
        job.decode(model.eval)


def palu_ranks(search: Any, model: Any, method: str, share: float, job: Job) -> tuple[dict[str, list[int]], Any]:
    """Return the most ranks of one method within the share, and the options that give them."""
    model.half = lambda: model  # float32, as all others are
    options = {"head_group_size": group_of(job.source["heads"]), "search_method": method, "decompose_method": "whiten"}
    calibration = {"calib_dataset": "", "model_id": "", "calib_seqlen": 0, "device": "cpu", "use_cache": True}
    whole = job.source["columns"] * job.source["layers"]
    allowed = columns_for(share, job.source["columns"], job.source["layers"])
    for total in range(allowed, 0, -1):
        # Of another sum, Palu would give out fractions of columns until none are left.
        ratio = total / whole
        if whole * ratio != total:
            continue
        args = SimpleNamespace(param_ratio_target=ratio, **options, **calibration)
        ranks, found, _ = search.rank_search(model, None, args)
        if found <= allowed:
            return ranks, args
    raise LeanError(f"Palu has no ranks for {share:.1%} of the cache")


def run_mha2mla(job: Job) -> None:
    """Take positions from keys, the lowest frequencies or those of the smallest norms; make a joint latent."""
    for name in ("nanotron", "nanotron.data", "nanotron.data.nanoset", "nanotron.logging"):
        stand_in(name)
    stand_in("datasets", Dataset=type("Dataset", (), {}))
    sys.path.insert(0, str(job.clone / "src" / "mha2mla"))
    norms, patching = importlib.import_module("2_norm"), importlib.import_module("patching_llama")
    load, arguments = importlib.import_module("patching_model_load"), importlib.import_module("arguments")
    from transformers.models.llama import modeling_llama

    heads, frequencies = job.source["heads"], job.source["head_dim"] // 2
    attention, rotation = modeling_llama.LlamaAttention, "apply_rotary_pos_emb"
    ways = [("high", frequencies // 2), ("2-norm", frequencies // 2), ("2-norm", frequencies // 4)]
    words = {"high": "the {} highest frequencies", "2-norm": "{} frequencies by 2-norm"}
    for amount in job.lengths:
        ranks = str(measure_norms(norms, job, amount))
        for (way, kept), share in itertools.product(ways, (1.0, *job.shares)):
            title = f"MHA2MLA's start, {words[way].format(kept)}"
            if way == "high" and amount != job.lengths[0]:  # it reads no tokens
                same = [row for row in job.rows if (row["method"], row["share"]) == (title, share)][:1]
                job.rows += [
                    {key: row[key] for key in row if key != "cached"} | {"calibration_tokens": amount} for row in same
                ]
                continue
            if not (rank := joint_rank(columns_for(share, job.source["columns"]), 2 * kept * heads, heads)):
                continue
            chosen = {"partial_rope_version": way, "rope_dim_for_mla": 2 * kept, "qk_tensor_path": ranks}
            made = arguments.MHA2MLAModelArguments(**chosen, svd_init_method="joint", low_rank=rank)
            stock = job.model()
            # It replaces both for all models; here until the next one.
            with (
                patch.object(attention, "forward", attention.forward),
                patch.object(modeling_llama, rotation, getattr(modeling_llama, rotation)),
            ):
                model, queries, keys = load.patch_model(stock, stock.config, made)
                patching.mha2mla_llama(queries, keys)
                attention.forward = calls_like_then(attention)
                if share == 1 and way == "high":
                    job.check("MHA2MLA's latent of all other columns", job.checked(model), job.expected["half"])
                parts = [layer.self_attn for layer in model.model.layers]
                columns = max(part.k_r_proj.out_features + part.kv_proj.down_kv.out_features for part in parts)
                job.keep(title, amount, share, columns, model)
                if share < 1:
                    job.decode(model.eval)


def measure_norms(norms: Any, job: Job, amount: int) -> Path:
    """Let MHA2MLA rank the frequencies of each key head; return its file."""
    tokens, file = job.tokens(amount), job.work / f"ranks-{amount}.pt"
    norms.Nanoset = lambda **_: [{"input_ids": row} for row in tokens]
    config = job.work / "2-norm.yaml"
    settings = {"is_nanoset": True, "dataset_folders": [], "sequence_length": tokens.shape[1]}
    settings |= {"model_name_or_path": str(job.work / "source"), "qk_output_dir": str(file)}
    write_json(config, {**settings, "sample_size": len(tokens), "batch_size": 1})
    with patch.object(sys, "argv", ["2_norm.py", "--config_file", str(config)]):
        norms.main()
    return file


class Peer(NamedTuple):
    """A project: what runs its code, and what its clone must have, a file and a name in it."""

    title: str
    url: str
    run: Callable[[Job], None]
    needs: tuple[tuple[str, str], ...]


PEERS = {
    "transmla": Peer(
        "TransMLA",
        "https://github.com/fxmeng/TransMLA",
        run_transmla,
        (
            ("transmla/transmla/partial_rope.py", "class PartialRope"),
            ("transmla/transmla/partial_rope.py", "def partial_rope("),
            ("transmla/transmla/lora_qkv.py", "def low_rank_qkv("),
            ("transmla/transmla/transformers/mla.py", "class MLAAttention"),
        ),
    ),
    "palu": Peer(
        "Palu",
        "https://github.com/shadowpa0327/Palu",
        run_palu,
        (
            ("palu/rank_search.py", "def rank_search("),
            ("palu/rank_search.py", "def rounding_search_result("),
            ("palu/decomposition.py", "def compress_model("),
        ),
    ),
    "mha2mla": Peer(
        "MHA2MLA",
        "https://github.com/JT-Ushio/MHA2MLA",
        run_mha2mla,
        (
            ("src/mha2mla/2_norm.py", "def main("),
            ("src/mha2mla/arguments.py", "class MHA2MLAModelArguments"),
            ("src/mha2mla/patching_model_load.py", "def patch_model("),
            ("src/mha2mla/patching_llama.py", "def mha2mla_llama("),
        ),
    ),
}


def run_job(file: Path) -> None:
    """Run a peer, as the process that `measure` starts for it."""
    about = read_json(file)
    job = Job(about)
    on_cpu()
    try:
        with redirect_stdout(io.StringIO()):
            PEERS[about["peer"]].run(job)
    except LeanError as error:
        about["refused"] = str(error)
    write_json(file, {**about, "rows": job.rows, "checks": job.checks})


# --- the benchmark ----------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> harness.Record:
    if options.model is None:
        raise LeanError("give the checkpoint: a directory or a .gguf file")
    clones = {name: path for name in PEERS if (path := getattr(options, name)) is not None}
    commits = {name: commit_of(PEERS[name], path) for name, path in clones.items()}
    source = open_causal_lm(options.model)
    about = shape_of(source)
    data = prepare_data(options.calibration, vocab_size=source.config.vocab_size, tokenizer=str(source.directory))
    lengths = {
        amount: calibration_tokens(data, source.config, amount, options.length)
        for amount in options.calibration_lengths
    }
    texts = evaluated_texts(source, options)
    windows = windows_of(texts, options.length, options.windows)
    model = load_model(source, torch.float32)
    before, expected = losses_of(model, windows), expected_losses(model, windows, about)
    del model
    given = {"source": about, "shares": options.shares, "expected": expected}
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        rewrite(options.model, work / "source", torch.float32, stock=True)
        save_file({name: tensor.contiguous() for name, tensor in windows.items()}, work / "windows.safetensors")
        for amount, tokens in lengths.items():
            np.save(work / f"tokens-{amount}.npy", tokens)
        for name, clone in clones.items():
            found[name] = run_peer(name, clone, {**given, "lengths": list(lengths), "work": directory})
        rows = measure_ours(source, lengths, options.shares, windows, work)
    rows += [row for one in found.values() for row in one["rows"]]
    evaluated = [{**text.record(), "windows": len(losses)} for text, losses in zip(texts, before, strict=True)]
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
    command = [sys.executable, __file__, "--job", str(file)]
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
    """Return the rows of latents, the first one with what it caches in decoding."""
    from transformers import AutoModelForCausalLM

    tensors, rows = finite(source.tensors), []
    for amount, tokens in lengths.items():
        print(f"{OURS}, {amount:,} tokens ...", file=sys.stderr, flush=True)
        made = [Latents(source.config, tensors, share) for share in shares]
        with tempfile.TemporaryDirectory(dir=work) as directory:
            sweeps = Sweeps(source.config, tensors, tokens, Path(directory), made)
            for share, found in zip(shares, sweeps.run(), strict=True):
                out = Path(directory, f"{share}")
                write_model(source, out, found.config, found.tensors, torch.float32)
                plan = found.config.plan
                columns = plan.kv_bytes_per_token(torch.float32) / torch.float32.itemsize / len(plan.layers)
                row = {"method": OURS, "calibration_tokens": amount, "share": share, "columns": columns}
                rows.append({**row, "losses": losses_of(load_model(open_causal_lm(out), torch.float32), windows)})
                if len(rows) == 1:
                    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
                    rows[0]["cached"] = decoded(model, windows["ids.0"][:1, :PROMPT])
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
        blocks.append(f"Calibrated on {amount:,} tokens:")
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


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        run_job(Path(sys.argv[2]))
        return
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
    parser.add_argument("--length", type=int, default=512, metavar="N", help="of a sequence and a window")
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
