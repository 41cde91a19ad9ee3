"""`leanqkv eliminate`, `verify`, `import`, `export` and the audit of `inspect`, as a person uses them."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shapes import randomize, tiny, tokens
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from leanqkv import LeanForCausalLM, progress

FREE = {"norm_type": "none", "norm_eps": 1e-5}
SKIPLESS = FREE | {"attention_skip": False, "mlp_skip": False}
HF = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 97, "num_attention_heads": 4}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(name: str, shape: str, *mechanisms: str, **fields) -> LeanForCausalLM:
    model = randomize(LeanForCausalLM(tiny(shape, *mechanisms, **fields)), std=32**-0.5)
    model.save_pretrained(name)
    return model.eval()


def save_llama(name: str, **options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = randomize(LlamaForCausalLM(LlamaConfig(**HF, max_position_embeddings=64, num_key_value_heads=2)), std=0.2)
    model.save_pretrained(name, **options)
    return model.eval()


IN_A_FRESH_PROCESS = """
import sys, torch
from transformers import AutoModelForCausalLM
logits = []
for directory in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    logits.append(model.eval()(torch.load("ids.pt")).logits.detach())
assert "leanqkv" not in sys.modules
torch.save(logits, "logits.pt")
"""


def logits_in_a_fresh_process(*directories: str) -> list[torch.Tensor]:
    torch.save(tokens(2, 12), "ids.pt")
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, *directories]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return torch.load("logits.pt")


@torch.no_grad()
def logits(directory: str) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(directory).eval()(tokens(2, 12)).logits


def assert_logits(computed: torch.Tensor, model) -> None:
    expected = model(tokens(2, 12)).logits.detach()
    # float32 rounding, amplified by condition numbers of some hundred
    assert (computed - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.slow
def test_strict_and_stock_results_load_in_a_fresh_process(folder, unwrapped):
    skipless, llama = save("skipless", "llama", "gqa", **SKIPLESS), save_llama("llama")
    code, out, err = unwrapped("eliminate", "skipless", "--remove", "query,output", "--out", "strict")
    assert (code, err) == (0, "")
    assert "29,248 -> 23,104 parameters (-21.0%)" in out
    assert not [name for name in load_file("strict/model.safetensors") if "q_proj" in name or "o_proj" in name]
    assert unwrapped("eliminate", "llama", "--remove", "block-diagonal", "--format", "stock", "--out", "stock")[0] == 0
    assert json.loads(Path("stock/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    strict, stock = logits_in_a_fresh_process("strict", "stock")
    assert_logits(strict, skipless)
    assert_logits(stock, llama)
    block = load_file("stock/model.safetensors")["model.layers.0.self_attn.v_proj.weight"].view(2, 8, 32)
    starts = [s for s in range(25) if torch.equal(block[..., s : s + 8], torch.eye(8).expand(2, 8, 8))]
    assert len(starts) == 1, "no identity block is written out"

    assert unwrapped("verify", "llama", "stock")[0] == 0
    code, out, _ = unwrapped("verify", "skipless", "strict")
    assert code == 0
    assert "the same function" in out


def test_the_certificate_says_what_was_done(folder, unwrapped):
    save("free", "gpt", **FREE)
    assert unwrapped("eliminate", "free", "--remove", "query", "--layer", "1", "--out", "less")[0] == 0
    report = json.loads(Path("less/certificate.json").read_text())
    assert report["removed"] == ["query"]
    assert report["layers"] == [1]
    assert report["parameters"] == {"before": 26_656, "after": 28_736}  # the head is untied
    assert report["exact"]["relative"] < 1e-12
    assert report["dtypes"]["fp32"]["result"]["relative"] < 1e-4
    assert set(report["dtypes"]) == {"fp64", "fp32", "bf16"}
    (name,) = report["conditions"]
    assert name == "model.layers.1.self_attn.q_proj.weight"
    digest = hashlib.sha256(Path("less/model.safetensors").read_bytes()).hexdigest()
    assert report["weights_sha256"] == digest
    assert report["config"]["after"]["query"] == [{"type": "identity", "scale": 1.0, "bias": False, "layers": [1]}]


def test_what_is_not_solved_twice_is_shown_against_rounding(folder, unwrapped, monkeypatch):
    monkeypatch.setattr("leanqkv.eliminate.certify.RECOMPUTED", 0)
    save("free", "gpt", **FREE)
    code, out, _ = unwrapped("eliminate", "free", "--remove", "query", "--layer", "1", "--out", "less")
    assert code == 0
    report = json.loads(Path("less/certificate.json").read_text())
    assert report["exact"] is None
    distance, explained = (f"{report['rounding'][name]:.1e}" for name in ("distance", "explained"))
    assert f"stored in float32: logits lie {distance} off; rounding explains up to {explained}" in out
    assert "before rounding" not in out


@pytest.mark.parametrize("factor, what", [(0.0, "all zero"), (1e200, "not finite")])
def test_logits_that_measure_nothing_certify_nothing(folder, unwrapped, factor, what):
    model = LeanForCausalLM(tiny("llama", **SKIPLESS)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    model.save_pretrained("source")
    code, _, err = unwrapped("verify", "source", "source")
    assert code == 2
    assert f"the original's own logits are {what}" in err


def test_verify_tells_two_models_apart(folder, unwrapped):
    save("one", "gpt")
    shutil.copytree("one", "other")
    tensors = load_file("other/model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] += 0.5
    save_file(tensors, "other/model.safetensors", metadata={"format": "pt"})
    assert unwrapped("verify", "one", "one")[0] == 0
    code, out, _ = unwrapped("verify", "one", "other")
    assert code == 1
    assert "not the same function" in out
    save("narrow", "gpt", vocab_size=96)
    assert unwrapped("verify", "one", "narrow")[0] == 2


def test_a_text_can_be_certified_on(folder, unwrapped, monkeypatch):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save("one", "gpt")
    vocabulary = {chr(97 + i): i for i in range(26)} | {"?": 26}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", eos_token="?").save_pretrained("one")
    Path("text.txt").write_text("a b c d e f g h " * 4)
    assert unwrapped("eliminate", "one", "--remove", "block-diagonal", "--text", "text.txt", "--out", "less")[0] == 0
    assert json.loads(Path("less/certificate.json").read_text())["inputs"] == {"input_ids": [2, 16]}
    assert Path("less/tokenizer.json").exists()
    Path("short.txt").write_text("a")
    assert "too short" in unwrapped("verify", "one", "less", "--text", "short.txt")[2]


def test_the_bytes_of_a_token_behind_the_windows_are_said(folder, unwrapped):
    save("windowed", "llama", sliding_window=8, window_layers=[0, 2])
    assert (
        "KV cache, bfloat16: 384 bytes per token until a window of 8 is full, then 128, "
        in (unwrapped("inspect", "windowed")[1])
    )


@pytest.mark.parametrize("window, code, words", [(64, 2, "the last 64 in the other"), (8, 1, ""), (200, 0, "")])
def test_windows_that_no_token_shows_are_not_one_function(folder, unwrapped, window, code, words):
    save("whole", "llama", max_position_embeddings=200)
    shutil.copytree("whole", "windowed")
    config = json.loads(Path("windowed/config.json").read_text())
    Path("windowed/config.json").write_text(json.dumps(config | {"sliding_window": window, "window_layers": [1]}))
    found, _, err = unwrapped("verify", "whole", "windowed")
    assert found == code and words in err


def test_the_last_positions_are_compared_too(folder, unwrapped):
    save("learned", "gpt", max_position_embeddings=200)
    shutil.copytree("learned", "other")
    tensors = load_file("other/model.safetensors")
    tensors["model.embed_positions.weight"][190, 3] += 1.0
    save_file(tensors, "other/model.safetensors", metadata={"format": "pt"})
    scaled = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 100}
    for name, long in (("long", 4.0), ("longer", 5.0)):
        factors = {"short_factor": [1.0] * 4, "long_factor": [long] * 4}
        save(name, "llama", max_position_embeddings=200, rope_parameters={**scaled, **factors})
    for pair, expected in ((("learned", "other"), 1), (("long", "longer"), 1), (("long", "long"), 0)):
        assert unwrapped("verify", *pair)[0] == expected


@pytest.mark.slow
def test_import_and_export_lead_back(folder, unwrapped):
    llama = save_llama("llama", max_shard_size="20KB")
    code, out, _ = unwrapped("import", "llama", "--out", "ours")
    assert code == 0
    assert "LeanForCausalLM" in out
    assert_logits(logits("ours"), llama)
    code, out, _ = unwrapped("export", "ours", "--out", "back")
    assert code == 0
    assert "LlamaForCausalLM" in out
    returned = AutoModelForCausalLM.from_pretrained("back").state_dict()
    for name, tensor in llama.state_dict().items():
        assert torch.equal(returned[name], tensor), name


@pytest.mark.slow
def test_norms_that_an_epsilon_disables(folder, unwrapped):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=3, n_head=4, layer_norm_epsilon=1e12)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draws = torch.randn(parameter.shape)
            parameter.copy_(1e6 * (1 + 0.1 * draws) if ".ln_" in name and "weight" in name else 0.2 * draws)
    model.save_pretrained("free")
    code, out, _ = unwrapped(
        "eliminate", "free", "--remove", "query", "--layer", "1", "--format", "stock", "--out", "less"
    )
    assert code == 0
    assert "the norms that the epsilon disables" in out
    assert_logits(logits("less"), model)
    packed = load_file("less/model.safetensors")["transformer.h.1.attn.c_attn.weight"]
    assert torch.equal(packed[:, :32], torch.eye(32))


def test_inspect_says_what_applies_and_why_not(folder, unwrapped):
    save("free", "gpt", **FREE)
    save_llama("llama")
    code, out, err = unwrapped("inspect", "free")
    assert (code, err) == (0, "")
    assert "--remove query | key | value | output of one layer (any of 0-2)" in out
    assert "skip connections carry the stream past them" in out
    assert "worst condition number" in out
    code, out, _ = unwrapped("inspect", "llama", "--no-spectra")
    assert code == 0
    assert "RMSNorm" in out
    assert "condition number" not in out


@pytest.mark.slow
def test_inspect_sums_a_checkpoint_up_in_about_ten_lines(folder, cli):
    """30 layers: which model, how large, what can go and what cannot, the worst condition; rows only on demand."""
    torch.manual_seed(0)
    config = LlamaConfig(**HF | {"num_hidden_layers": 30}, num_key_value_heads=2, max_position_embeddings=64)
    model = LlamaForCausalLM(config).bfloat16()
    weight = model.model.layers[16].self_attn.o_proj.weight
    with torch.no_grad():
        weight[5] *= 1e-5
    model.save_pretrained("llama")
    code, out, _ = cli("inspect", "llama")
    assert code == 0
    lines = out.splitlines()
    assert len(lines) <= 12
    size = 2 * sum(parameter.numel() for parameter in model.parameters()) / 1e3
    shape = "LlamaForCausalLM, 30 layers, width 32, 4 heads of 8 (2 for keys and values), vocabulary 97"
    assert lines[0] == f"llama: {shape}, {size:.1f} kB in bfloat16"
    text = " ".join(out.split())
    assert f"parameters: {model.num_parameters():,} (" in text
    assert f"KV cache, bfloat16: {30 * 2 * 2 * 8 * 2:,} bytes per token, 50.0% of MHA" in text
    saved = 30 * 2 * 8 * 8
    assert f"--remove block-diagonal saves {saved:,} weights ({saved / model.num_parameters():.2%})" in text
    assert text.count("RMSNorm") == 1
    condition = torch.linalg.cond(weight.double()).item()
    assert f"worst condition number: {condition:.3g}, layer 16 o_proj (of 120 projections)" in text


def test_a_tied_head_is_counted_once(folder, cli):
    model = LlamaForCausalLM(LlamaConfig(**HF | {"tie_word_embeddings": True}, num_key_value_heads=2))
    model.save_pretrained("tied")
    text = " ".join(cli("inspect", "tied", "--layers", "--no-spectra")[1].split())
    assert f"parameters: {model.num_parameters():,} (" in text
    assert f"fewer of {model.num_parameters():,} weights" in text


@pytest.mark.slow
def test_inspect_says_plainly_that_norms_leave_less_than_a_hundredth(folder, unwrapped):
    for name, plain in (("gpt2-124m", True), ("tiny", False)):
        _, out, _ = unwrapped("inspect", name)
        assert ("less than 1% of the weights can be removed exactly" in out) is plain, name


@pytest.mark.parametrize("columns", [80, 160])
def test_inspects_rows_can_be_told_apart(folder, cli, monkeypatch, columns):
    monkeypatch.setattr(progress.console, "width", columns)
    save("source", "llama", num_hidden_layers=12)
    code, out, _ = cli("inspect", "source", "--layers")
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    rows = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│ layer ")]
    names = [row[0].strip() for row in rows]
    assert names == [f"layer {i} {slot}_proj" for i in range(12) for slot in "qkvo"]
    weight = load_file("source/model.safetensors")["model.layers.11.self_attn.k_proj.weight"].double()
    values = torch.linalg.svdvals(weight)
    row = [cell.strip() for cell in rows[names.index("layer 11 k_proj")]]
    shape, rank = "×".join(map(str, weight.shape)), str(torch.linalg.matrix_rank(weight).item())
    assert row[1:] == [shape, rank, f"{values[0] / values[-1]:.3g}", f"{values[-1]:.3g}"]
    assert "│  0-11 │" in out
    assert "block-diagonal │ yes" in out and "P1 Prop. 3.2" in out


def test_a_model_by_name_has_a_summary_and_its_layers(folder, cli):
    code, out, _ = cli("inspect", "gpt2-124m+skipv1")
    assert code == 0
    assert out.startswith("gpt2-124m+skipv1: LeanForCausalLM, 12 layers, width 768, 12 heads of 64")
    assert "│  1-11 │" in out and "6-11 of layer 0" in out
    assert "condition" not in out


@pytest.mark.slow
def test_long_work_names_its_phases_in_a_log(folder, cli, monkeypatch):
    """What a log may show: what is being done, and how much of it is done."""
    lines: list[str] = []

    class RecordedBar(progress.Bar):
        def __call__(self, done: int, total: int) -> None:
            super().__call__(done, total)
            lines.append(self.line())

        def start(self, description: str) -> None:
            super().start(description)
            lines.append(self.line())

    monkeypatch.setattr(progress, "Bar", RecordedBar)
    save("source", "gpt", **SKIPLESS)
    save_llama("llama")
    for command, phases in {
        "eliminate source --remove query,output --out less": (
            *("solving: bases in which rounding loses little", "solving: the query weight of layer 0, 1 of 3 matrices"),
            *("writing: 0 of 0 MB, about", "certifying: the original in fp64, ", "comparing: the result in bf16, "),
        ),
        "verify source less": ("comparing: the original in fp64, ", "comparing: the result in bf16, "),
        "inspect source": ("singular values: 0 of 12", "singular values: 11 of 12, about 0:00 left"),
        "import llama --out ours": ("writing: 0 of 0 MB, about",),
        "export ours --out back": ("writing: 0 of 0 MB, about",),
    }.items():
        lines.clear()
        assert cli(*command.split())[0] == 0
        for phase in phases:
            assert any(line.startswith(phase) for line in lines), (phase, lines)


# --- bad input: one line, exit code 2, the source untouched, nothing left behind --------------------------------------


def changed(name: str, change) -> None:
    save("source", "gpt", **FREE)
    tensors = load_file("source/model.safetensors")
    change(tensors[name])
    save_file(tensors, "source/model.safetensors", metadata={"format": "pt"})


def test_max_condition_overrides(folder, unwrapped):
    changed("model.layers.1.self_attn.q_proj.weight", lambda tensor: tensor[4].mul_(1e-9))
    command = ("eliminate", "source", "--remove", "query", "--layer", "1", "--plain", "--dtype", "fp64")
    code, _, err = unwrapped(*command, "--out", "result")
    assert code == 2
    assert "the limit is 1e+08 (--max-condition)" in err
    assert unwrapped(*command, "--max-condition", "1e12", "--out", "result")[0] == 0
