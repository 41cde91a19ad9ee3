"""The command lines whose results are held, and the files that they start from."""

import json
import shlex
from pathlib import Path

import torch
from corpus import SHAPE, write_corpus
from shapes import randomize, tiny
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from leanqkv import LeanForCausalLM
from leanqkv.data.tokenizer import train_tokenizer

MODEL = f"tiny{SHAPE}"
DATA = "--data corpus.txt"
TRAINING = f"{DATA} --steps 4 --batch-size 8 --precision fp32 --device cpu --evaluate-every 2 --evaluation-sequences 8"
CALIBRATION = "--calibration corpus.txt --tokens 512 --sequence-length 32"

NAMES = (
    *("train", "uptrain", "plan-run", "tokenize", "compare", "report", "inspect", "eliminate", "verify"),
    *("convert", "frontier", "import", "export", "generate", "serve", "bench", "eval", "presets"),
    *("experiments.analysis", "experiments.demo"),
)
# Each runs where those before it have left their files.
COMMANDS = f"""
presets
inspect {MODEL}+skipv1 --layers
plan-run {MODEL}+skipv1 --devices 2
tokenize {MODEL} {DATA}
train {MODEL} {TRAINING} --micro-batch-size 4 --keep-checkpoints --out run
inspect run --layers
compare {MODEL} {MODEL}+skipv1 {TRAINING} --seeds 1 --jobs 1 --out compared
report compared
import llama --out llama-ours
import gpt2 --out gpt2-ours --dtype bf16
export llama-ours --out llama-back
export gpt2-ours --family gpt2 --out gpt2-back
verify llama llama-back
convert llama --to latents --cache 75% {CALIBRATION} --evaluate held-out.txt --evaluate-tokens 128 --out latents
convert llama --to separate-latents {CALIBRATION} --out separate
convert llama --to merged-values --layers 1-2 {CALIBRATION} --out merged
convert gpt2 --to skipv1 {CALIBRATION} --out skipv1
convert gpt2 --to skipv1 --method mean-v --dtype bf16 --out mean
convert llama --to gqa --ratio 0.5 --out grouped
convert run --to nonlinear-query --seed 1 --out nonlinear
report latents
verify llama grouped
eliminate source --remove query --layer 1 --out less
verify source less --text held-out.txt
eliminate llama --remove block-diagonal --format stock --out block-diagonal
uptrain skipv1 {TRAINING} --micro-batch-size 8 --teacher gpt2 --out uptrained
frontier llama --evaluate held-out.txt {CALIBRATION} --calibrations 2 --evaluate-tokens 128 --budgets 75%
 --kinds latents,gqa --contexts 0 --out frontier
generate run --prompt "the quick" --max-new-tokens 8 --temperature 0 --device cpu
generate run --prompt "the quick" --max-new-tokens 8 --temperature 0 --cache-bits 8/4 --device cpu
eval latents --data held-out.txt --device cpu --out eval.json
eval latents --data held-out.txt --against llama --device cpu
eval latents --data held-out.txt --cache-bits 4 --context-length 160 --device cpu --out cached.json
eval run --tasks animals --include-path tasks --device cpu
experiments.analysis run {DATA} --samples 4 --probe-steps 2 --probe-rates 1e-4 --device cpu --out analysis
bench {MODEL} {MODEL}+skipv1 --context 8 --batch 1 --new-tokens 2 --rounds 1 --dtype fp32 --device cpu --out bench
bench {MODEL} --cache-bits 16,8/4 --context 8 --batch 1 --new-tokens 2 --rounds 1 --dtype fp32 --device cpu --out bits
"""

TASK = """
task: animals
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/animals.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: choices
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 3.0}
"""
QUESTIONS = [{"question": "the quick", "choices": [" fox", " dog jumps"], "answer": 0}] * 2

# Command lines that are refused; `source` is the model of leanqkv without norms.
REFUSALS = f"""
inspect tinny
inspect tiny+skipv9
inspect tiny+skip
inspect tiny+skipv1:ration=0.5
inspect tiny+mqa+skipv1
inspect tiny+num_key_value_heads=1+gqa
inspect tiny+gqa:group_size=0
inspect tiny+hidden_size=wide
inspect tiny+norm_eps=.nan
inspect tiny+num_hidden_layers=1000000000000
inspect nothing
inspect cut
inspect list
inspect wide
inspect no/where
train
train encoder-tiny+vocab_size=200 {DATA} --out result
compare tiny encoder-tiny {DATA} --out result
compare query --base small {DATA} --out result
train {MODEL} --data nowhere.txt --out result
train {MODEL} --data empty.txt --out result
train {MODEL} --data latin.txt --out result
train {MODEL} --data lines.jsonl --out result
train {MODEL} {DATA} --precision fp8 --out result
train {MODEL} {DATA} --precision fp32 --out nothing/../cut
train {MODEL} {DATA} --learning-rate 0 --out result
train {MODEL} {DATA} --steps 1.5 --out result
train {MODEL} {DATA} --steps 2000000000 --precision fp32 --out result
train {MODEL} {DATA} --context-length 33 --precision fp32 --out result
train {MODEL} {DATA} --device gpu --out result
train {MODEL} {DATA} --tokenizer nowhere --out result
train {MODEL} {DATA} --seed -1 --out result
train {MODEL} {DATA} --nonsense 1 --out result
train {MODEL} {DATA} --out ""
uptrain source --steps 10 {DATA} --distillation 0.1 --out result
uptrain source --steps 10 {DATA} --out source/result
tokenize vit-tiny {DATA}
plan-run tiny --accelerator tpu
plan-run tiny --utilization 2
compare tiny --out result
compare tiny tiny --out result
compare quickstart --lr-grid fast --out result
compare tiny small --lr-grid 1e-3,0.001 --out result
compare tiny small --lr-grid 1e-3 --learning-rate 1 --out result
compare tiny small --launcher cloud --out result
compare --suite nope --out result
report nowhere
eliminate source --remove queries --out result
eliminate source --remove query --layer 99 --out result
eliminate source --remove query --format ggml --out result
eliminate source --remove query --dtype int8 --out result
eliminate llama --remove query --out result
eliminate source --remove query --out source
verify source nowhere
verify source source --text empty.txt
convert source --to skipv9 --out result
convert source --to latents --out result
convert source --to latents --cache 120% --calibration corpus.txt --out result
convert source --to skipv1 --method svdd --calibration corpus.txt --out result
convert source --to gqa --ratio 0.9 --out result
convert source --to gqa --calibration corpus.txt --out result
convert source --to nonlinear-query --no-choose --out result
convert source --to merged-values --layers 9-1 --calibration corpus.txt --out result
convert source --to skipv1 --calibration corpus.txt --tokens 100000000 --out result
convert source --to gqa --ratio 0.5 --sequence-length 65 --out result
frontier source --evaluate corpus.txt --kinds gqa:50% --out result
frontier source --evaluate corpus.txt --budgets 84%,,75% --out result
frontier source --evaluate corpus.txt --cache-bits 8,1 --out result
import nowhere --out result
import corpus.txt --out result
export source --format gguf --out result
export source --family bert --out result
generate source
generate source --prompt the --max-new-tokens 1000
generate source --prompt the --temperature nan
generate source --prompt the --chat
generate source --prompt the --cache-bits 3
generate nothing --prompt a
serve source --engine other
serve source --port 70000
serve source --cache-bits 8/16
bench {MODEL} {MODEL} --out result
bench {MODEL} --context 8,-1 --out result
bench {MODEL} --cache-bits 16,8/4/2 --out result
bench {MODEL} --context 8 --batch 1000000000 --out result
eval source
eval source {DATA} --tasks animals
eval source {DATA} --limit 1
eval source {DATA} --split test
eval source {DATA} --cache-bits 4
eval source {DATA} --precision bf16+compile
experiments.analysis source {DATA} --probe-rates 2 --out result
experiments.analysis source {DATA} --samples 100000000 --out result
experiments.demo --steps 0 --out result
nonsense
"""


def command_lines(text: str) -> dict[str, list[str]]:
    """Return the words of every command line, by its text; a line that begins with a space goes on."""
    lines = text.strip().replace("\n ", " ").splitlines()
    return {line: shlex.split(line) for line in lines}


def prepare(place: Path) -> None:
    """Write texts, models with their tokenizer, a task, and folders that are no checkpoints."""
    content = write_corpus(place / "corpus.txt").read_text()
    (place / "held-out.txt").write_text("\n".join(reversed(content.splitlines()[:100])))
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    grouped = {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**sizes, **grouped)),
        "gpt2": GPT2LMHeadModel(GPT2Config(**sizes, n_positions=64, bos_token_id=0, eos_token_id=0)),
        "source": LeanForCausalLM(tiny("gpt", vocab_size=300, norm_type="none")),
    }
    tokenizer = train_tokenizer(iter([content]), 300)
    for name, model in models.items():
        randomize(model, std=0.2).save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    for name, text in {
        "empty.txt": "",
        "lines.jsonl": '{"text": "fine"}\n{"text": \n',
        "cut/config.json": '{"model_type": ',
        "list/config.json": "[1]",
        "wide/config.json": '{"model_type": "leanqkv", "hidden_size": "wide"}',
        "tasks/animals.yaml": TASK,
        "tasks/animals.jsonl": "".join(json.dumps(question) + "\n" for question in QUESTIONS),
    }.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    (place / "latin.txt").write_bytes("café ".encode("latin-1") * 99)
    (place / "nothing").mkdir()
    torch.manual_seed(0)
