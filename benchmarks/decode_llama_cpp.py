"""Our decoder against llama.cpp and transformers' `generate`, on the same GGUF file: tokens per second, in turns.

The file is written anew with all its matrices in F32, and in BF16; all three read these. Every side has a process of
its own, with the same prompts and the same number of threads. It decodes greedily, all sequences at once, and the time
to read the prompt is measured on its own. llama.cpp has its defaults: flash attention where it helps, a cache in F16.
It is built for this machine. Our decoder's matrix products are also done alone, in the same turns: what reading the
weights takes.

    pip install --no-binary llama-cpp-python llama-cpp-python
    OMP_NUM_THREADS=2 python benchmarks/decode_llama_cpp.py MODEL.gguf --out results/real/decode.json
    python benchmarks/decode_llama_cpp.py --tables results/real/decode.json
"""

import argparse
import ctypes
import importlib.metadata
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import harness
import numpy as np
import torch

from leanqkv.errors import LeanError
from leanqkv.files import make_directory, write_json

SIDES = ("ours", "llama.cpp", "generate")
# Our matrix products alone.
PRODUCTS = "products"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
# The ratio ours / llama.cpp that is the goal.
TARGET = 1.0


def rewritten(source: Path, target: Path, kind: str) -> Path:
    """Write a GGUF file with the fields of another one and its matrices in F32 or BF16; vectors stay F32."""
    import gguf

    if target.exists():
        return target
    reader, partial = gguf.GGUFReader(source), target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, reader.get_field("general.architecture").contents())
    wanted = gguf.GGMLQuantizationType[kind]
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType[{"F32": "ALL_F32", "BF16": "MOSTLY_BF16"}[kind]])
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        dtype = wanted if numbers.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target


# --- the three sides: each reads prompts [batch, length], then decodes so many tokens ---------------------------------


class Ours:
    """`Decoder`, on the model as `leanqkv` reads the file."""

    def __init__(self, file: Path, kind: str):
        from leanqkv.checkpoints.open import load_model, open_causal_lm
        from leanqkv.inference import Decoder

        self.decoder = Decoder(load_model(open_causal_lm(file), DTYPES[kind]))

    def prefill(self, ids: np.ndarray, room: int) -> None:
        self.next = self.decoder.prefill(torch.from_numpy(ids), room=room).argmax(-1)
        vars(self).pop("_products", None)  # their inputs have the batch's size

    def decode(self, count: int) -> list[Any]:
        made = []
        for _ in range(count):
            made.append(self.next)
            self.next = self.decoder.step(self.next).argmax(-1)
        return torch.stack(made, 1).tolist()

    @torch.inference_mode()
    def products(self, count: int) -> None:
        """The matrix products of so many steps, and nothing else: what reading the weights takes."""
        for _ in range(count):
            for multiply, inputs in self._products:
                multiply(inputs)

    @cached_property
    def _products(self) -> list[tuple[Callable[[torch.Tensor], Any], torch.Tensor]]:
        from leanqkv.inference.joined import JoinedProjections
        from leanqkv.inference.linear import FewRowsLinear

        found: list[tuple[Any, Any]] = []
        for module in self.decoder.model.modules():
            joined = vars(module).get("project")
            if isinstance(joined, JoinedProjections) and joined._once:
                found.append((joined._once[1], joined.layers[0]))
            elif isinstance(module, FewRowsLinear):
                found.append((module.product, module))
        dtype = self.decoder.model.dtype
        return [(multiply, torch.zeros(len(self.next), 1, layer.in_features, dtype=dtype)) for multiply, layer in found]


class Generate:
    """transformers' LLaMA and its `generate`, which goes on with the cache of the prompt."""

    def __init__(self, file: Path, kind: str):
        from transformers import AutoModelForCausalLM, DynamicCache

        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=DTYPES[kind])
        self.model, self.new_cache = model.eval(), DynamicCache
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def prefill(self, ids: np.ndarray, room: int) -> None:
        self.cache, self.ids = self.new_cache(config=self.model.config), torch.from_numpy(ids)
        for start in range(0, ids.shape[1] - 1, 512):  # the last token is the first that `generate` reads
            part = self.ids[:, start : min(start + 512, ids.shape[1] - 1)]
            self.model(input_ids=part, past_key_values=self.cache, logits_to_keep=1)

    @torch.inference_mode()
    def decode(self, count: int) -> list[Any]:
        length = self.ids.shape[1]
        self.ids = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            past_key_values=self.cache,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return self.ids[:, length:].tolist()


class LlamaCpp:
    """llama.cpp through its C interface."""

    def __init__(self, file: Path, kind: str):
        import llama_cpp

        self.lib = llama_cpp
        llama_cpp.llama_log_set(_silent(llama_cpp), ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.context = None

    def prefill(self, ids: np.ndarray, room: int) -> None:
        batch, length = ids.shape
        if self.context is not None:
            self.lib.llama_free(self.context)
        given = self.lib.llama_context_default_params()
        given.n_ctx, given.n_seq_max = batch * (length + room), batch
        given.n_threads = given.n_threads_batch = torch.get_num_threads()
        self.context = self.lib.llama_init_from_model(self.model, given)
        self.places, self.next = np.zeros(batch, dtype=int), np.zeros(batch, dtype=int)
        for row in range(batch):
            for start in range(0, length, given.n_batch):
                part = ids[row, start : start + given.n_batch]
                self._read(part, [row] * len(part), only_last=True)
            self.next[row] = self._likeliest(-1)

    def decode(self, count: int) -> list[Any]:
        made = []
        for _ in range(count):
            made.append(self.next.copy())
            self._read(self.next, range(len(self.next)), only_last=False)
            self.next = np.array([self._likeliest(row) for row in range(len(self.next))])
        return np.stack(made, 1).tolist()

    def _read(self, tokens: np.ndarray, rows: Any, only_last: bool) -> None:
        """Read a token of each of these rows (sequences); a row that is named again goes on."""
        batch = self.lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for at, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            batch.token[at], batch.pos[at] = int(token), int(self.places[row])
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
            batch.logits[at] = not only_last or at == len(tokens) - 1
            self.places[row] += 1
        status = self.lib.llama_decode(self.context, batch)
        self.lib.llama_batch_free(batch)
        if status:
            raise LeanError(f"llama_decode returned {status}")

    def _likeliest(self, place: int) -> int:
        logits = self.lib.llama_get_logits_ith(self.context, place)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


def _silent(llama_cpp: Any) -> Any:
    """A callback that llama.cpp gives its log to; kept, since the library holds the pointer alone."""
    global _CALLBACK
    _CALLBACK = llama_cpp.llama_log_callback(lambda *_: None)
    return _CALLBACK


CLASSES: dict[str, Callable[[Path, str], Any]] = {"ours": Ours, "llama.cpp": LlamaCpp, "generate": Generate}


def serve(side: str, file: Path, kind: str, pipe: Any) -> None:
    """Do what the pipe says, one (method, arguments) after the other; answer with the seconds and the result."""
    model = CLASSES[side](file, kind)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        method, *arguments = asked
        started = time.perf_counter()
        result = getattr(model, method)(*arguments)
        pipe.send((time.perf_counter() - started, result))


def cells(file: Path, kind: str, options: argparse.Namespace) -> Any:
    """Yield a row for every batch and context, as all sides do it in turns."""
    sides = ("ours", *options.others)
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for side in sides:
        pipes[side], theirs = spawn.Pipe()
        processes.append(spawn.Process(target=serve, args=(side, file, kind, theirs), daemon=True))
        processes[-1].start()
        pipes[side].recv()
    for batch, context in product(options.batch, options.context):
        ids = np.random.default_rng(0).integers(1000, 40_000, (batch, context))
        reading = {side: ask(pipes[side], "prefill", ids, (options.rounds + 1) * options.new) for side in sides}
        rates: dict[str, list[float]] = {side: [] for side in (*sides, PRODUCTS)}
        made: dict[str, list[Any]] = {}
        for turn in range(options.rounds + 1):
            for side in sides:
                seconds, tokens = ask(pipes[side], "decode", options.new)
                if turn == 0:  # the first turn takes what only a first turn takes
                    made[side] = tokens
                else:
                    rates[side].append(batch * options.new / seconds)
            if turn:
                rates[PRODUCTS].append(batch * options.new / ask(pipes["ours"], "products", options.new)[0])
        yield cell(kind, batch, context, {side: found[0] for side, found in reading.items()}, rates, made)
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(None)
        process.join()


def ask(pipe: Any, *what: Any) -> Any:
    """Have one side do something, and wait for it."""
    pipe.send(what)
    return pipe.recv()


def cell(
    kind: str,
    batch: int,
    context: int,
    reading: dict[str, float],
    rates: dict[str, list[float]],
    made: dict[str, list[Any]],
) -> dict[str, Any]:
    """Return one row of the record; `same_tokens` is the share of the first turn's tokens that are ours, in order."""
    row: dict[str, Any] = {"weights": kind, "batch": batch, "context": context, "sides": {}}
    row["products_per_second"] = median(rates.pop(PRODUCTS))
    for side, found in rates.items():
        row["sides"][side] = {
            "tokens_per_second": median(found),
            "prompt_tokens_per_second": batch * context / reading[side],
            "same_tokens": float((np.array(made[side]) == np.array(made["ours"])).mean()),
        }
        if side != "ours":
            row["sides"][side]["ratio"] = harness.spread(
                [ours / theirs for ours, theirs in zip(rates["ours"], found, strict=True)]
            )
    speeds = ", ".join(f"{side} {found['tokens_per_second']:.1f}" for side, found in row["sides"].items())
    print(f"{kind}, batch {batch}, context {context}: {speeds} tokens/s", flush=True)
    return row


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every cell."""
    if options.model is None:
        raise LeanError("give the .gguf file")
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    make_directory(options.work)
    record: dict[str, Any] = {"source": options.model.name, "new": options.new, "rounds": options.rounds, "rows": []}
    record["threads"] = torch.get_num_threads()
    record["omp_wait_policy"] = os.environ.get("OMP_WAIT_POLICY")  # ACTIVE: threads without work keep their core
    if "llama.cpp" in options.others:
        import llama_cpp

        record["llama_cpp_python"] = importlib.metadata.version("llama-cpp-python")
        record["llama_cpp_build"] = llama_cpp.llama_print_system_info().decode().strip()
    for kind in options.weights:
        file = rewritten(options.model, options.work / f"{options.model.stem}-{kind}.gguf", kind)
        for row in cells(file, kind, options):
            record["rows"].append(row)
            if options.out is not None:
                write_json(options.out.with_suffix(".partial.json"), record)
    if options.out is not None:
        options.out.with_suffix(".partial.json").unlink(missing_ok=True)
    return record


def tables(record: dict[str, Any]) -> str:
    """Return the record as Markdown: decoding, then reading the prompt."""
    sides = [side for side in SIDES if side in record["rows"][0]["sides"]]
    others = [side for side in sides if side != "ours"]
    head = ("weights", "batch", "context")
    decoding, reading = [], []
    for row in record["rows"]:
        first = (row["weights"], str(row["batch"]), f"{row['context']:,}")
        found = row["sides"]
        decoding.append(
            (
                *first,
                f"{row['products_per_second']:.1f}",
                *(f"{found[side]['tokens_per_second']:.1f}" for side in sides),
                *(harness.spread_text(found[side]["ratio"]) for side in others),
            )
        )
        reading.append((*first, *(f"{found[side]['prompt_tokens_per_second']:,.0f}" for side in sides)))
    speeds = [f"{side}, tokens/s" for side in sides]
    alone = "our matrix products alone"
    ratios = [f"ours / {side}" for side in others]
    return "\n\n".join(
        (
            harness.table((*head, alone, *speeds, *ratios), decoding, "l" + "r" * (3 + len(speeds) + len(ratios))),
            "Reading the prompt:",
            harness.table((*head, *speeds), reading, "l" + "r" * (2 + len(speeds))),
        )
    )


def main() -> None:
    parser = harness.command_line(__doc__)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL.gguf")
    parser.add_argument("--others", nargs="*", choices=SIDES[1:], default=list(SIDES[1:]), help="besides ours")
    parser.add_argument("--weights", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--new", type=int, default=16, help="tokens that each side decodes in a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("runs/real/decode"), help="for the files in F32 and BF16")
    harness.run(parser, measure, tables)


if __name__ == "__main__":
    main()
