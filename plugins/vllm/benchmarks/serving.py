"""leanqkv on vLLM: tokens against `generate`, memory, and throughput.

The record grows by one part at a time: --parts measures those that are named and leaves the others in --out as they
are.

    python plugins/vllm/benchmarks/serving.py --parts tokens memory --out results/vllm/serving.json
    python plugins/vllm/benchmarks/serving.py --parts throughput --checkpoint MODEL.gguf --out results/vllm/serving.json
    python plugins/vllm/benchmarks/serving.py --parts long --out results/vllm/long-requests.json
    python plugins/vllm/benchmarks/serving.py --parts throughput --dtype float32 --out results/vllm/float32.json
    python plugins/vllm/benchmarks/serving.py --tables results/vllm/serving.json
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "plugins/vllm/tests"), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import harness
import httpx
import torch
import vllm
from engines import core_of, engine, expected, prompts_of_uneven_length, run, run_in_turns
from product.mechanisms import CASES, Case
from shapes import randomize

from leanqkv import LeanConfig, LeanForCausalLM, preset
from leanqkv.data.tokenizer import train_tokenizer
from leanqkv.environment import record_header
from leanqkv.errors import LeanError
from leanqkv.files import read_json, write_json
from leanqkv.progress import progress_bar

FIELDS = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "max_position_embeddings": 512}
NEW, REQUESTS, LONGEST = 70, 16, 250
# So little that requests are preempted: pages for about 1,600 tokens of the baseline.
SCARCE = 1600
MEMORY = 64 * 2**20
# Tokens of a prompt, and new ones, in the round before those that count.
WARM_UP = 8
LLAMA = "llama-130m"
# Tokens of the baseline that there is memory for in a measurement of throughput; None: as much as 64 requests need.
MEMORIES: tuple[int | None, ...] = (None, SCARCE)
ALL = 0
BASELINE, NOT_OF_SCARCITY = "leanqkv", "vLLM's own class"
LATENTS = {f"{kind.replace('-', ' ')} of 84%": kind for kind in ("latents", "separate-latents", "unrotated-latents")}
# Models whose pages are of codes of so many bits.
CODED = {"4-bit pages": "4", "8/4-bit pages": "8/4"}
# Tokens of a request, the new ones among them, where the precision of the pages is compared.
LONG = (256, 1024, 4096)
OF_MEMORY = ("", "gqa", "skipv1", "skipv1+gqa", "skipkv1", "skipv1-yoco", "latent-values", "latent-keys+latent-values")


def measure_tokens() -> list[dict[str, Any]]:
    """Every mechanism: requests of uneven length in two rounds, the second with what the first left in the cache."""
    rows = []
    with progress_bar("mechanisms") as bar, tempfile.TemporaryDirectory() as place:
        for done, case in enumerate(CASES):
            rows.append({"mechanism": case.name, **_tokens(case, Path(place, str(done)))})
            bar(done + 1, len(CASES))
    return rows


def _tokens(case: Case, place: Path) -> dict[str, Any]:
    model = case.model(**FIELDS).float()
    model.save_pretrained(place)
    prompts = prompts_of_uneven_length(model.config.vocab_size, REQUESTS, LONGEST)
    wanted = expected(model, prompts, NEW) if case.name != "prefix" else []
    bytes_per_token = model.config.plan.kv_bytes_per_token(torch.float32)
    memory = SCARCE * bytes_per_token
    options = {"max_model_len": 512, "max_num_batched_tokens": 96, "kv_cache_memory_bytes": memory}
    try:
        with engine(place, **options) as llm:
            core = core_of(llm)
            runner = core.model_executor.driver_worker.worker.model_runner
            groups = runner.kv_cache_config.kv_cache_groups
            allocated = sum(one.kv_cache_spec.page_size_bytes / one.kv_cache_spec.block_size for one in groups)
            rounds = [run(llm, prompts, number, NEW) for number in range(2)]
            kernel = runner.model.kernel is not None
    except ValueError as error:
        return {"refused": str(error)}
    return {
        "kernel": kernel,
        "bytes_per_token": bytes_per_token,
        "allocated_per_token": allocated,
        "rounds": [
            {
                "equal": sum(found == right for found, right in zip(one["tokens"], wanted, strict=True)),
                "gaps": _gaps(model, prompts, one["tokens"], wanted),
                "preempted": one["preempted"],
                "cached_prompt_tokens": one["cached"],
            }
            for one in rounds
        ],
    }


@torch.no_grad()
def _gaps(model: Any, prompts: Any, found: Any, wanted: Any) -> list[float]:
    """Where a token differs: how much larger the right one's logit is, in units of the largest one's rounding."""
    gaps = []
    for prompt, one, right in zip(prompts, found, wanted, strict=True):
        place = next((place for place, pair in enumerate(zip(one, right, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            logits = model.double()(torch.tensor([prompt + right[:place]])).logits[0, -1]
            gap = abs(logits[right[place]] - logits[one[place]]) / (torch.finfo(torch.float32).eps * logits.abs().max())
            gaps.append(float(gap))
            model.float()
    return gaps


def measure_memory() -> list[dict[str, Any]]:
    """Sequences at once in a fixed memory: 96 requests of 100 tokens and 28 more."""
    rows = []
    with progress_bar("memory") as bar:
        for done, name in enumerate(OF_MEMORY):
            mechanisms = name.split("+") if name else []
            fields = {"num_hidden_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
            fields |= {"vocab_size": 512, "max_position_embeddings": 256, "intermediate_size": 256}
            fields |= {"num_key_value_heads": 4} if "gqa" in mechanisms else {}
            config = preset("llama-130m", *(one for one in mechanisms if one != "gqa"), **fields)
            found = _at_once(config, 96, 100, 28)
            kept = config.plan.kv_bytes_per_token(torch.float32)
            rows.append({"mechanism": name or "baseline", "bytes_per_token": kept, **found})
            bar(done + 1, len(OF_MEMORY))
    return rows


def measure_long() -> list[dict[str, Any]]:
    """Sequences at once in a fixed memory, by the precision of the pages and the length of the requests, in bfloat16.

    2 layers of 4 heads of 64 columns, each with a key and a value: 2,048 bytes a token in bfloat16.
    """
    rows, places = [], [(bits, tokens) for tokens in LONG for bits in (None, "8/4", "4")]
    fields = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    fields |= {"vocab_size": 512, "max_position_embeddings": max(LONG), "intermediate_size": 256}
    with progress_bar("long requests") as bar:
        for done, (bits, tokens) in enumerate(places):
            own: dict[str, Any] = {"dtype": "bfloat16", "block_size": 64, "max_num_seqs": 512}
            # So many that memory is full before the first request ends.
            own |= {"max_num_batched_tokens": 16_384}
            own |= {"additional_config": {"cache_bits": bits}} if bits else {}
            requests = 5 * 2**15 // tokens  # five times those of 16 bits that have room
            found = _at_once(preset("llama-130m", **fields), requests, tokens - 48, 48, **own)
            rows.append({"cache_bits": bits, "request_tokens": tokens, **found})
            bar(done + 1, len(places))
    return rows


def _at_once(config: LeanConfig, requests: int, prompt: int, new: int, **own: Any) -> dict[str, Any]:
    """Answer so many requests with random weights; return how many ran at once at most, and how many were preempted."""
    prompts = torch.randint(1, 512, (requests, prompt), generator=torch.Generator().manual_seed(0)).tolist()
    options = {"max_model_len": prompt + new, "max_num_seqs": 128, "max_num_batched_tokens": 2048}
    options |= {"kv_cache_memory_bytes": MEMORY, "enable_prefix_caching": False, "block_size": 32, **own}
    with tempfile.TemporaryDirectory() as directory:
        randomize(LeanForCausalLM(config), std=0.05).save_pretrained(directory)
        with engine(Path(directory), **options) as llm:
            blocks = core_of(llm).model_executor.driver_worker.worker.model_runner.kv_cache_config.num_blocks
            found = run(llm, prompts, 0, new)
    counts = {name: found[name] for name in ("most_at_once", "preempted")}
    return {"tokens": blocks * options["block_size"], **counts}


def measure_throughput(options: argparse.Namespace) -> list[dict[str, Any]]:
    """New tokens per second, engines of one process taking steps in turn: what disturbs one disturbs all.

    A second process has the engines in the reverse order, so that their place in it does not count for one of them.
    LLAMA's shape with random weights, unless it is left out; and a checkpoint, if one is named.
    """
    rows, checkpoint = [], options.checkpoint
    with tempfile.TemporaryDirectory() as place:
        shapes = {} if options.only_checkpoint else {LLAMA: _random_models(Path(place, "random"))}
        if checkpoint is not None:
            shapes[Path(checkpoint).name.split(".")[0]] = _models_of(
                checkpoint, Path(place, "checkpoint"), [LATENTS[name] for name in options.models if name in LATENTS]
            )
        memories = [setting for setting in MEMORIES if options.memory in (setting or ALL, None)]
        together = [(shape, setting) for shape in shapes for setting in memories]
        with progress_bar("throughput") as bar:
            for done, (shape, tokens) in enumerate(together):
                models = {name: place for name, place in shapes[shape].items() if name in (BASELINE, *options.models)}
                if tokens is not None:
                    models.pop(NOT_OF_SCARCITY, None)
                orders = (models, _reversed(models))[: options.orders]
                timed = [_in_a_process(order, tokens, options.dtype, options.rounds) for order in orders]
                for name in models:
                    row = {"shape": shape, "model": name, "memory": tokens, "dtype": options.dtype}
                    rows.append({**row, "rounds": [time for times in timed for time in times[name]]})
                bar(done + 1, len(together))
    return rows


def _random_models(place: Path) -> dict[str, Path]:
    """LLAMA's shape as ours, as vLLM's own class, with SkipV1, with MLA and in pages of codes."""
    for name, mechanisms in (("leanqkv", ()), ("skipv1", ("skipv1",)), ("mla", ("mla",))):
        LeanForCausalLM(preset(LLAMA, *mechanisms, max_position_embeddings=512)).bfloat16().save_pretrained(
            place / name
        )
    _leanqkv("export", place / "leanqkv", "--out", place / "stock")
    names = {BASELINE: "leanqkv", NOT_OF_SCARCITY: "stock", "skipv1": "skipv1", "mla": "mla"}
    return {name: place / directory for name, directory in names.items()} | dict.fromkeys(CODED, place / "leanqkv")


def _models_of(checkpoint: str, place: Path, kinds: Sequence[str]) -> dict[str, Path]:
    """A checkpoint as ours, as vLLM's own class, with SkipV1, with latents of these kinds and in pages of codes."""
    place.mkdir()
    _leanqkv("import", checkpoint, "--out", place / "leanqkv")
    _leanqkv("export", place / "leanqkv", "--out", place / "stock")
    _leanqkv("convert", place / "leanqkv", "--to", "skipv1", "--method", "mean-v", "--out", place / "skipv1")
    text = ROOT / "docs/reference-conversion.md"  # the ranks that little text gives do for the time
    for kind in kinds:
        given = ("--to", kind, "--calibration", text, "--tokens", 2048)
        _leanqkv("convert", place / "leanqkv", *given, "--out", place / kind)
    return {
        BASELINE: place / "leanqkv",
        NOT_OF_SCARCITY: place / "stock",
        "skipv1": place / "skipv1",
        **{name: place / kind for name, kind in LATENTS.items()},
        **dict.fromkeys(CODED, place / "leanqkv"),
    }


def _leanqkv(*arguments: Any) -> None:
    _run([str(Path(sys.executable).with_name("leanqkv")), *map(str, arguments)])


def _reversed(models: dict[str, Path]) -> dict[str, Path]:
    return dict(reversed(models.items()))


def _in_a_process(models: dict[str, Path], *given: Any) -> dict[str, list[dict[str, Any]]]:
    """Time models; given: as `time_together` takes it."""
    places = {name: str(directory) for name, directory in models.items()}
    done = _run([sys.executable, __file__, "--together", json.dumps([places, *given])])
    return json.loads(done.splitlines()[-1])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LeanError(f"{' '.join(command[:3])}: {done.stderr[-2000:]}")
    return done.stdout


def time_together(models: dict[str, str], tokens: int | None, dtype: str, rounds: int) -> None:
    """Print what 64 requests of 128 tokens take for 128 new tokens each, round by round, after a short one.

    tokens: of the baseline, for which there is memory; None: for all.
    """
    given = {"dtype": dtype, "max_model_len": 512, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    given |= {"enforce_eager": False, "enable_prefix_caching": False}
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, 5000, (64, 128), generator=draw).tolist()
    given["block_size"] = 128 if tokens is None else 32  # of little memory a large page leaves much empty
    needed = 64 * 320 if tokens is None else tokens
    baseline = LeanConfig.from_pretrained(models[BASELINE])
    memory = needed * baseline.plan.kv_bytes_per_token(getattr(torch, dtype))
    with ExitStack() as stack:
        engines = []
        for name, directory in models.items():
            own = {**given, "kv_cache_memory_bytes": memory}
            if name in CODED:
                own |= {"block_size": 64, "additional_config": {"cache_bits": CODED[name]}}
            engines.append(stack.enter_context(engine(Path(directory), **own)))
        run_in_turns(engines, [prompt[:WARM_UP] for prompt in prompts], 0, WARM_UP)
        found = [run_in_turns(engines, prompts, number, 128) for number in range(1, rounds + 1)]
    kept = ("seconds", "steps", "preempted", "most_at_once")
    times = {name: [{key: one[place][key] for key in kept} for one in found] for place, name in enumerate(models)}
    print(json.dumps(times))


def measure_clients() -> list[dict[str, Any]]:
    """`leanqkv serve --engine vllm` under 50 clients with 200 requests, of which a third hangs up."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place, "served")
        config = preset(LLAMA, "skipv1", num_hidden_layers=4, hidden_size=256, num_attention_heads=8, vocab_size=512)
        randomize(LeanForCausalLM(config), std=0.05).save_pretrained(directory)
        train_tokenizer(iter([Path(harness.__file__).read_text() * 4]), 512).save_pretrained(directory)
        log, port = Path(place, "log"), _free_port()
        command = [str(Path(sys.executable).with_name("leanqkv")), "serve", str(directory), "--engine", "vllm"]
        options = ["--max-model-len", "512", "--dtype", "float32", "--kv-cache-memory-bytes", str(MEMORY)]
        with log.open("w") as file:
            server = subprocess.Popen([*command, "--port", str(port), "--", *options], stdout=file, stderr=file)
            try:
                return [asyncio.run(_clients(f"http://127.0.0.1:{port}", server, log))]
            finally:
                server.terminate()
                server.wait()


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


async def _clients(address: str, server: subprocess.Popen, log: Path) -> dict[str, Any]:
    outcomes: list[str] = []
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        while server.poll() is None and not await _answers(client):
            await asyncio.sleep(1)
        if server.poll() is not None:
            raise LeanError(f"the server ended: {log.read_text()[-2000:]}")
        waiting = list(range(200))
        started = time.perf_counter()
        await asyncio.gather(*(_one_client(client, waiting, outcomes) for _ in range(50)))
        seconds = time.perf_counter() - started
        await asyncio.sleep(3)
        metrics = (await client.get("/metrics")).text
    lines = log.read_text().splitlines()
    return {
        "seconds": seconds,
        "answered": outcomes.count("answered"),
        "hung_up": outcomes.count("hung up"),
        "lost": 200 - outcomes.count("answered") - outcomes.count("hung up"),
        **{name: _metric(metrics, name) for name in ("num_requests_running", "num_requests_waiting")},
        "kv_cache_usage": _metric(metrics, "kv_cache_usage_perc"),
        "errors_in_log": sum("ERROR" in line or "Traceback" in line for line in lines),
    }


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


async def _one_client(client: httpx.AsyncClient, waiting: list[int], outcomes: list[str]) -> None:
    """Take requests until there are none left; hang up on every third after some tokens."""
    while waiting:
        number = waiting.pop()
        body = {"model": "served", "prompt": "def " * (1 + number % 40), "max_tokens": 64, "stream": True}
        pieces = 0
        async with client.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as answer:
            async for line in answer.aiter_lines():
                pieces += line.startswith("data: {")
                if number % 3 == 0 and pieces == 5:
                    outcomes.append("hung up")
                    break
            else:
                outcomes.append("answered" if pieces and answer.status_code == 200 else f"status {answer.status_code}")


def _metric(metrics: str, name: str) -> float:
    found = [line for line in metrics.splitlines() if line.startswith(f"vllm:{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


PARTS = {
    "tokens": lambda options: measure_tokens(),
    "memory": lambda options: measure_memory(),
    "long": lambda options: measure_long(),
    "throughput": measure_throughput,
    "clients": lambda options: measure_clients(),
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record with the parts that are asked for measured anew, and the others as --out has them."""
    record = read_json(options.out) if options.out is not None and options.out.exists() else {}
    parts = {part: record[part] for part in PARTS if part in record}
    for part in options.parts:
        header = record_header("benchmark", "serving")
        made = {"time": header["time"], "git_commit": header["git_commit"], "vllm": vllm.__version__}
        parts[part] = {"made": made, "rows": PARTS[part](options)}
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(options.out, header | parts)
    return parts


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    made = []
    if "tokens" in record:
        made.append(tokens_table(record["tokens"]["rows"]))
    if "memory" in record:
        made.append(memory_table(record["memory"]["rows"]))
    if "long" in record:
        made.append(long_table(record["long"]["rows"]))
    if "throughput" in record:
        made.append(throughput_table(record["throughput"]["rows"]))
    if "clients" in record:
        made.append(clients_table(record["clients"]["rows"]))
    return "\n\n".join(made)


def clients_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return what became of the requests, and of the server."""
    headers = ("answered", "hung up", "lost", "running after", "cache in use after", "errors in the log", "time")
    cells = [
        (
            *(str(row[name]) for name in ("answered", "hung_up", "lost")),
            f"{row['num_requests_running'] + row['num_requests_waiting']:.0f}",
            *(f"{row['kv_cache_usage']:.0%}", str(row["errors_in_log"]), f"{row['seconds']:.0f} s"),
        )
        for row in rows
    ]
    return harness.table(headers, cells, "rrrrrrr")


def throughput_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each shape, memory and model: tokens per second, and the ratio to our baseline in the round."""
    base = {(row["shape"], row["memory"]): row["rounds"] for row in rows if row["model"] == "leanqkv"}
    cells = []
    for row in rows:
        pairs = list(zip(row["rounds"], base[row["shape"], row["memory"]], strict=True))
        speed = harness.spread_text(harness.spread([64 * 128 / one["seconds"] for one, _ in pairs]), 0)
        ratio = harness.spread_text(harness.spread([other["seconds"] / one["seconds"] for one, other in pairs]), 2)
        memory = "all" if row["memory"] is None else f"{row['memory']:,}"
        counts = (str(max(one[name] for one, _ in pairs)) for name in ("most_at_once", "preempted"))
        steps = sum(one["steps"] for one, _ in pairs)
        step = (f"{len(pairs) * 64 * 128 / steps:.1f}", f"{1e3 * sum(one['seconds'] for one, _ in pairs) / steps:.0f}")
        cells.append((row["shape"], memory, row["model"], speed, ratio, *counts, *step))
    headers = ("shape", "memory for tokens", "model", "new tokens/s", "of leanqkv's baseline", "at once", "preempted")
    return harness.table((*headers, "new tokens a step", "a step, ms"), cells, "lrlrrrrrr")


def tokens_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each mechanism, the refused ones at the end."""
    cells = []
    for row in sorted(rows, key=lambda one: "refused" in one):
        if "refused" in row:
            cells.append((row["mechanism"], "refused", "", "", "", ""))
            continue
        gaps = [gap for one in row["rounds"] for gap in one["gaps"]]
        equal = "/".join(str(one["equal"]) for one in row["rounds"])
        preempted = "/".join(str(one["preempted"]) for one in row["rounds"])
        way = "vLLM's" if row["kernel"] else "leanqkv's"
        sizes = (f"{row['bytes_per_token']:,}", f"{row['allocated_per_token']:,.0f}")
        cells.append((row["mechanism"], way, *sizes, f"{equal} of {REQUESTS}", f"{max(gaps):.1f}" if gaps else ""))
        cells[-1] = (*cells[-1], preempted)
    headers = ("mechanism", "attention", "bytes per token", "allocated", "equal", "largest gap", "preempted")
    return harness.table(headers, [(*cell, *[""] * (len(headers) - len(cell))) for cell in cells], "llrrrrr")


def memory_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each mechanism."""
    cells = [
        (row["mechanism"], f"{row['bytes_per_token']:,}", f"{row['tokens']:,}", str(row["most_at_once"]))
        for row in rows
    ]
    return harness.table(("mechanism", "bytes per token", "tokens in 64 MiB", "sequences at once"), cells)


def long_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each length of requests and precision of the pages."""
    whole = {row["request_tokens"]: row["most_at_once"] for row in rows if row["cache_bits"] is None}
    cells = [
        (
            f"{row['request_tokens']:,}",
            f"{row['cache_bits'] or 16} bits",
            str(row["most_at_once"]),
            f"{row['most_at_once'] / whole[row['request_tokens']]:.2f}",
            str(row["preempted"]),
        )
        for row in rows
    ]
    headers = ("tokens of a request", "pages", "sequences at once", "of 16 bits", "preempted")
    return harness.table(headers, cells, "rlrrr")


def main() -> None:
    if sys.argv[1:2] == ["--together"]:
        time_together(*json.loads(sys.argv[2]))
        return
    parser = harness.command_line(__doc__)
    parser.add_argument("--checkpoint", metavar="MODEL", help="also time this model: a GGUF file or a directory")
    parser.add_argument("--only-checkpoint", action="store_true", help=f"leave {LLAMA} out of the throughput")
    every = (NOT_OF_SCARCITY, "skipv1", "mla", *LATENTS, *CODED)
    parser.add_argument(
        "--models", nargs="+", choices=every, default=every, metavar="MODEL", help="beside our baseline"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the throughput")
    parser.add_argument("--memory", type=int, choices=(ALL, SCARCE), help="for so many tokens; 0: for all requests")
    parser.add_argument("--orders", type=int, choices=(1, 2), default=2, help="of the engines")
    parser.add_argument("--rounds", type=int, default=2, help="in each order")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
