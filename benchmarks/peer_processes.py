"""The process of a peer: other projects' code, called as their papers use it; peers.py starts it with a job."""

import copy
import importlib
import inspect
import io
import itertools
import logging
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from peer_losses import columns_for, decoded, group_of, joint_rank, losses_of
from safetensors.torch import load_file
from torch import Tensor

from leanqkv.errors import LeanError
from leanqkv.files import read_json, write_json

BATCH = 4  # calibration sequences at a time
CHECKED = 2  # windows of the first text that a peer is checked on
ROUNDING = 2e-5  # nats, of a window's mean loss in float32; on SmolLM2-135M all agree to 1e-6
PROMPT = 56  # tokens
ROPE, FOLDED = 64, 2  # TransMLA: columns that keep their positions, and frequencies that count as one


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


if __name__ == "__main__":
    run_job(Path(sys.argv[1]))
