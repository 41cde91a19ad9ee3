"""Norms removed by training on: their schedule, the norms on the way, the folded model, runs, and what goes then."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corpus import SHAPE, spec, write_corpus
from harness import sequence_losses
from shapes import randomize, tiny, tokens
from torch import nn

from leanqkv import LeanConfig, LeanError, LeanForCausalLM, preset
from leanqkv.checkpoints.disabled_norms import fold_norms
from leanqkv.checkpoints.open import load_model, open_checkpoint
from leanqkv.checkpoints.tensors import weights_hash
from leanqkv.data.batches import batch_plan
from leanqkv.train.norm_removal import RemovableNorm, make_removable, removal_schedule, remove_norms
from leanqkv.train.tasks import task_of
from leanqkv.train.training import train

pytestmark = pytest.mark.slow

EXACT = 1e-9
STEPS = 68  # the fewest for two layers
FOUR = {"num_hidden_layers": 4}


@pytest.mark.parametrize("layers, steps, last", [(12, 300, 104), (24, 500, 188), (36, 1200, 544), (48, 1200, 356)])
def test_the_schedule_is_the_papers(layers: int, steps: int, last: int) -> None:
    """Baroni et al.'s for GPT-2 small, medium, large and XL: MLPs' norms every 2 steps (large: 4), then attention's."""
    schedule = removal_schedule(preset("gpt2-124m", num_hidden_layers=layers), steps)
    gap = 4 if layers == 36 else 2
    assert schedule[:2] == [(10 * gap, "model.layers.0.post_attention_layernorm"), (11 * gap, schedule[1][1])]
    assert schedule[layers][1] == "model.layers.0.input_layernorm" and len(schedule) == 2 * layers + 1
    assert schedule[-1] == (last, "model.norm")
    assert schedule == sorted(schedule)


@pytest.mark.parametrize("kind", ["layernorm", "layernorm with a bias", "rmsnorm"])
@pytest.mark.parametrize("constant", [0.0, 0.7])
def test_a_norm_on_its_way_is_its_equation(kind: str, constant: float) -> None:
    """Values and gradients against the norm of torch, and once removed against loops."""
    torch.manual_seed(0)
    norm = nn.RMSNorm(5, eps=0.1) if kind == "rmsnorm" else nn.LayerNorm(5, eps=0.1, bias=kind != "layernorm")
    randomize(norm.double(), std=0.5)
    removable = RemovableNorm(norm).train()
    removable.constant.fill_(constant)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    centred = x if kind == "rmsnorm" else x - x.sum(-1, keepdim=True) / 5
    deviations = [(sum(v**2 for v in row.tolist()) / 5 + 0.1) ** 0.5 for row in centred.flatten(0, 1)]
    assert removable(x).dtype == x.dtype
    assert removable.observed.tolist() == pytest.approx([sum(deviations) / 6, 1], rel=1e-6)
    removable(torch.zeros_like(x))
    removable.eval()(x)
    assert removable.observed.tolist() == pytest.approx([sum(deviations) / 6 + 0.1**0.5, 2], rel=1e-6)

    def expected(x: torch.Tensor) -> torch.Tensor:
        if not constant:
            return norm(x)
        y = (x if kind == "rmsnorm" else x - x.mean(-1, keepdim=True)) / removable.constant.double() * norm.weight
        return y if removable.bias is None else y + norm.bias

    weights = torch.randn(2, 3, 5, dtype=torch.float64)
    results = []
    for function in (removable, expected):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        results.append((y, *torch.autograd.grad((y * weights).sum(), (leaf, norm.weight))))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


FOLDED = {
    "gpt": ("gpt", {}),
    "llama": ("llama", {}),
    "biases": (
        "gpt",
        {"norm_bias": True, "attention_bias": True, "residual_multiplier": 0.4, "embedding_multiplier": 2.0},
    ),
    "parallel": ("llama", {"block_type": "parallel"}),
    "parallel, biases": ("gpt", {"block_type": "parallel", "norm_bias": True}),
    "one norm": ("gpt", {"block_type": "parallel_shared_norm", "norm_bias": True}),
    "skipless": ("gpt", {"attention_skip": False, "mlp_skip": False}),
    "blocks in turns": ("llama", FOUR | {"num_hidden_groups": 2, "group_order": "turns"}),
    "experts": ("llama", {"mlp_type": "moe", "num_local_experts": 3, "num_experts_per_tok": 2}),
    "averages": ("gpt", {"depth_average": {"dilation": 1, "period": 1}}),
    "a latent": ("llama", {"kv_lora_rank": 8, "qk_rope_head_dim": 4}),
    "shared values": ("gpt", {"key_value": {"type": "first_layer_values"}, "norm_bias": True}),
    "gated values": ("llama", {"key_value": {"type": "interpolated_values", "mode": "per_token"}}),
    "a gate": ("gpt", {"output_gate": {"type": "sigmoid"}, "norm_bias": True}),
    "an encoder": ("gpt", {"task": "masked_lm", "norm_bias": True}),
    "prefixes": ("llama", {"mask_type": "prefix"}),
    "QK-norm": ("llama", {"qk_norm": True}),
    "QK-norm, biases": ("gpt", {"qk_norm": "width", "norm_bias": True}),
}


def half_removed(config: LeanConfig, constants: bool = True) -> nn.Module:
    """With norms that divide by constants, all of them different."""
    model = randomize(task_of(config).model_class(config), std=0.2)
    make_removable(model)
    for number, norm in enumerate(module for module in model.modules() if isinstance(module, RemovableNorm)):
        norm.constant.fill_(constants * (0.8 + 0.1 * number))
    return model


@pytest.mark.parametrize("name", FOLDED)
def test_the_folded_model_is_the_trained_one(name: str) -> None:
    shape, fields = FOLDED[name]
    config = tiny(shape, **fields)
    model = half_removed(config)
    folded, checked = remove_norms(config, model.state_dict())
    assert folded.config.norm_type == "none" and checked["exact"]["relative"] <= EXACT
    assert not [name for name, _ in folded.named_parameters() if "layernorm" in name or name == "model.norm.weight"]
    ids = tokens(2, 9)
    with torch.no_grad():
        wanted, found = (m.double().eval()(ids).logits for m in (model, folded))
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()  # stored in float32


def test_a_fold_that_is_wrong_is_refused(monkeypatch) -> None:
    config = tiny("gpt")
    state = half_removed(config).state_dict()
    wrong = fold_norms(config, state, lambda norm: 1.0)
    monkeypatch.setattr("leanqkv.train.norm_removal.fold_norms", lambda *_: wrong)
    with pytest.raises(LeanError, match="another function: its logits differ by"):
        remove_norms(config, state)


@pytest.fixture(scope="module")
def source(tmp_path_factory, data):
    """A checkpoint, and the specification of a run that removes its norms."""
    directory = tmp_path_factory.mktemp("source")
    made = spec(data)
    config = LeanConfig(**made.config | {"hidden_dropout": 0.0})
    randomize(LeanForCausalLM(config), std=0.1).save_pretrained(directory)
    recipe = replace(made.recipe, steps=STEPS, learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=0)
    schedule = removal_schedule(config, STEPS)
    changes = {"recipe": recipe, "norm_schedule": schedule, "initial_sha256": weights_hash(directory)}
    return directory, replace(made, config=config.as_overrides(), **changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data, source):
    directory, made = source
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, train(made, data, out, device="cpu", initial=directory)


def test_a_run_leaves_a_model_without_norms(data, source, finished) -> None:
    """Its loss is the last one of the run; the record has each norm's constant and the loss before each kind goes."""
    (_, made), (out, record) = source, finished
    assert json.loads((out / "record.json").read_text()) == json.loads(json.dumps(record))
    opened = open_checkpoint(out)
    assert opened.config.norm_type == "none" and not opened.config.tie_word_embeddings
    sizes = {"train_tokens": data.train_tokens, "validation_tokens": data.validation_tokens, "evaluation_sequences": 16}
    plan = batch_plan(out / "batches", context_length=32, batch_size=8, steps=STEPS, seed=0, **sizes)
    loss = sequence_losses(load_model(opened), data.validation(), plan.evaluation_starts, 32, 8).mean().item()
    assert record["final"]["validation_loss"] == pytest.approx(loss, rel=1e-5)
    losses = {entry["step"]: entry["loss"] for entry in record["evaluations"]}
    gone = {"none": 20, "MLP": 24, "MLP and attention": 34, "all": STEPS}
    assert record["norms"]["stages"] == [{"removed": n, "step": s, "loss": losses[s]} for n, s in gone.items()]
    removed = record["norms"]["removed"]
    assert [(entry["step"], entry["norm"]) for entry in removed] == made.norm_schedule
    assert all(entry["constant"] > 0 for entry in removed)
    parameters = sum(weight.numel() for weight in load_model(opened).parameters())
    assert record["parameters"]["total"] == parameters
    assert record["norms"]["exact"]["relative"] <= 1e-9
    assert "without norms" in (out / "README.md").read_text()


@pytest.mark.long_cases
@pytest.mark.parametrize("at", [14, 21, 31])
def test_a_killed_run_goes_on_bit_identically(data, source, finished, tmp_path, at: int) -> None:
    """From a checkpoint before the first removal, just before it, and between two; none of them is a model."""
    (directory, made), (out, record) = source, finished

    def progress(step, *_):
        if step == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(made, data, tmp_path / "run", device="cpu", initial=directory, progress=progress)
    with pytest.raises(LeanError, match=r"its norms are being removed \(model"):
        open_checkpoint(tmp_path / "run" / f"checkpoint-{at // 10 * 10}")
    again = train(made, data, tmp_path / "run", device="cpu", initial=directory)
    for name in ("training", "evaluations", "final", "norms"):
        assert again[name] == record[name]
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_the_constant_is_the_mean_deviation_of_the_batch_before(data, source, finished, tmp_path) -> None:
    """Of training batches alone, both halves of them: every evaluation lies between two of them."""
    (directory, made), (_, whole) = source, finished
    seen: dict[nn.Module, list[float]] = {}

    def watch(module, args):
        if isinstance(module, RemovableNorm) and module.training:
            x = args[0].detach().double()
            seen.setdefault(module, []).append(x.var(-1, correction=0).add(module.eps).sqrt().mean().item())

    handle = nn.modules.module.register_module_forward_pre_hook(watch)
    try:
        record = train(replace(made, micro_batch_size=4), data, tmp_path / "run", device="cpu", initial=directory)
    finally:
        handle.remove()
    first, first_mlp, second, second_mlp, last = seen.values()  # as they are called
    wanted = [
        sum(series[2 * step - 2 : 2 * step]) / 2
        for (step, _), series in zip(made.norm_schedule, (first_mlp, second_mlp, first, second, last), strict=True)
    ]
    assert [entry["constant"] for entry in record["norms"]["removed"]] == pytest.approx(wanted, rel=1e-5)
    assert [entry["constant"] for entry in whole["norms"]["removed"]] == pytest.approx(wanted, rel=1e-4)


def test_what_a_run_cannot_do_beside(data, source, tmp_path) -> None:
    directory, made = source
    for options, words in (({"keep_checkpoints": True}, "`keep_checkpoints`"), ({}, "`shard`")):
        changed = made if options else replace(made, shard="fsdp")
        with pytest.raises(LeanError, match=f"`remove_norms` and {words} do not go together"):
            train(changed, data, tmp_path / "run", initial=directory, **options)
    assert not (tmp_path / "run").exists()


STAY = {
    "dyt": {"norm_type": "dyt"},
    "'none', which divides by no": {"norm_type": "none"},
    "norm_placement is 'both'": {"norm_placement": "both"},
    "norm_offset is 1": {"norm_type": "rmsnorm", "norm_offset": 1.0},
    "router": {"mlp_type": "moe", "num_local_experts": 2, "norm_bias": True},
    "num_hidden_groups is 1": {"num_hidden_groups": 1, "norm_bias": True},
    "hyper_connections": {"hyper_connections": {"type": "hyper", "streams": 2}},
    "the query of layer 0 is 'identity'": {"query": [{"type": "identity"}]},
    "a model of images": {"task": "image_classification"},
}


@pytest.mark.parametrize("words", STAY)
def test_norms_that_stay(words: str) -> None:
    fields = STAY[words]
    config = preset("vit-tiny") if "task" in fields else tiny("gpt", **fields)
    with pytest.raises(LeanError, match=f"`remove_norms`: the norms of this model stay: .*{words}"):
        removal_schedule(config, 1000)


def test_a_run_that_is_too_short() -> None:
    with pytest.raises(LeanError, match="5 norms go in 68 steps or more, found `steps=67`"):
        removal_schedule(tiny("gpt", num_hidden_layers=2), 67)
    assert removal_schedule(tiny("gpt", num_hidden_layers=2), 68)


SHAPES = {
    "all skips": ("", "query", "0"),
    "attention skip alone": ("+mlp_skip=false", "query", "all"),
    "skipless": ("+attention_skip=false+mlp_skip=false", "query,output", "all"),
    "an encoder": ("+task=masked_lm", "query", "0"),
}


@pytest.mark.long_cases
@pytest.mark.parametrize("shape", SHAPES)
def test_from_training_to_a_verified_elimination(shape: str, tmp_path, cli, monkeypatch) -> None:
    fields, remove, layer = SHAPES[shape]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    given = ("--data", str(write_corpus(tmp_path / "corpus.txt")), "--precision", "fp32", "--device", "cpu")
    given += ("--batch-size", "4", "--evaluation-sequences", "4")
    assert cli("train", f"tiny{SHAPE}{fields}", *given, "--steps", "4", "--out", "run")[0] == 0
    code, out, err = cli("uptrain", "run", *given, "--steps", str(STEPS), "--remove-norms", "--out", "free")
    assert (code, err) == (0, "") and "norms removed: MLP and attention, step 34: " in out
    assert cli("eliminate", "free", "--remove", remove, "--layer", layer, "--out", "less")[0] == 0
    assert cli("verify", "free", "less")[0] == 0
    before, after = (load_model(open_checkpoint(Path(name))).num_parameters() for name in ("free", "less"))
    assert before - after == {"query": 1, "query,output": 2}[remove] * (1 if layer == "0" else 2) * 32**2
