"""Models of images: the classifier against its equations, its data, its training, its comparison."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from oracle.images import classify
from oracle.test_oracle import exact_angles, gradients_of
from PIL import Image
from safetensors.torch import load_file
from shapes import assert_near, randomize
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from leanqkv import (
    ConfigError,
    LeanConfig,
    LeanError,
    LeanForCausalLM,
    LeanForImageClassification,
    count_parameters,
    kv_bytes_per_token,
    plan,
    preset,
    recipe,
)
from leanqkv.checkpoints import load_model, open_checkpoint
from leanqkv.compare.records import load_comparison
from leanqkv.data import image_batch, make_image_plan, prepare_images, scaled_pixels
from leanqkv.evaluate import image_outcomes
from leanqkv.report.comparison import markdown
from leanqkv.report.comparison_page import write_report
from leanqkv.train import RunSpec, choose_precision, train

TINY = {
    "image_size": 4,
    "patch_size": 2,
    "num_channels": 2,
    "num_labels": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
}
NO_BIAS = dict.fromkeys(("norm_bias", "attention_bias", "attention_output_bias", "mlp_bias"), False)
ROPE = {"position_embedding_type": "rope"}
FOUR = {"num_hidden_layers": 4}

CASES: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    ((), {}),
    ((), NO_BIAS | ROPE),
    ((), {"position_embedding_type": "none", "patch_size": 4, "num_channels": 1}),
    (("identity-query",), {}),
    (("nonlinear-query",), NO_BIAS),
    (("residual-query", "keys-as-values"), ROPE),
    (("skipv1",), {}),
    (("skipv1", "gqa"), ROPE | NO_BIAS),
    (("skipv0",), {}),
    (("mla", "skipv1"), {}),
    (("mla:rank=7,rope_dim=2",), ROPE),
    (("yoco",), FOUR),
    (("cla-v", "identity-query"), FOUR),
    ((), {"key_value": {"type": "borrowed_values", "heads": [[0, 1, 0, 0], [1, 0, 0, 0]]}}),
    (("resformer:mode=per_token", "denseformer"), {}),
    (("no-output", "identity-query"), {"block_type": "parallel"}),
    (("mlp-query",), {"attention_skip": False}),
    ((), {"block_type": "parallel_shared_norm", "norm_type": "dyt", "qk_norm": True}),
    ((), {"num_hidden_groups": 1}),
    ((), {"mlp_type": "moe", "num_local_experts": 3, "mlp_bias": False}),
]


def vit(*mechanisms: str, **overrides: Any) -> LeanConfig:
    return preset("vit-digits", *mechanisms, **{**TINY, **overrides})


def pixels(config: LeanConfig, batch: int = 2) -> Tensor:
    assert config.num_channels and config.image_size
    shape = (batch, config.num_channels, config.image_size, config.image_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def case_id(case: tuple[tuple[str, ...], dict[str, Any]]) -> str:
    return "+".join((*case[0], *(f"{name}={value}" for name, value in case[1].items()))) or "plain"


every = pytest.mark.parametrize("case", CASES, ids=case_id)


# --- the model --------------------------------------------------------------------------------------------------------


@every
def test_parameters_are_the_plans_and_all_get_a_gradient(case):
    names, overrides = case
    config = vit(*names, **overrides)
    model = LeanForImageClassification(config).double()
    if not config.attention_skip:
        randomize(model)  # of a start so small, little reaches the last layer without its skip
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == plan(config).parameter_shapes
    assert count_parameters(config).total == sum(p.numel() for p in model.parameters())
    model(pixel_values=pixels(config, 8), labels=torch.arange(8) % 3).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        zero = name.endswith("k_proj.bias") and config.position_embedding_type != "rope"  # shifts all scores alike
        assert zero or parameter.grad.abs().max() > 1e-12, name


@every
def test_model_is_its_equations(case, monkeypatch):
    names, overrides = case
    config = vit(*names, **overrides)
    model = randomize(LeanForImageClassification(config)).double().eval()
    if config.position_embedding_type == "rope":
        exact_angles(model, monkeypatch)
    images = pixels(config).double()
    tensors = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = torch.stack([classify(tensors, config, image) for image in images])
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = gradients_of(expected, direction, tensors)
    floor = 1e-4 * max(gradient.abs().max().item() for gradient in wanted.values())
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        logits = model(pixel_values=images).logits
        assert_near(logits, expected, 1e-10, f"{backend} logits")
        for name, gradient in gradients_of(logits, direction, dict(model.named_parameters())).items():
            assert_near(gradient, wanted[name], 1e-10, f"{backend} gradient of {name}", floor)


def test_plain_model_is_the_vit_of_transformers():
    theirs = ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=24,
            image_size=4,
            patch_size=2,
            num_channels=2,
            layer_norm_eps=1e-6,
            num_labels=3,
        )
    )
    randomize(theirs).double().eval()
    renamed = {
        "vit.embeddings.cls_token": "model.embed_patches.class_token",
        "vit.embeddings.position_embeddings": "model.embed_positions.weight",
        "vit.embeddings.patch_embeddings.projection.": "model.embed_patches.projection.",
        "layernorm_before": "input_layernorm",
        "layernorm_after": "post_attention_layernorm",
        "vit.layernorm.": "model.norm.",
        "attention.attention.query": "self_attn.q_proj",
        "attention.attention.key": "self_attn.k_proj",
        "attention.attention.value": "self_attn.v_proj",
        "attention.output.dense": "self_attn.o_proj",
        "attention.q_proj": "self_attn.q_proj",
        "attention.k_proj": "self_attn.k_proj",
        "attention.v_proj": "self_attn.v_proj",
        "attention.o_proj": "self_attn.o_proj",
        "intermediate.dense": "mlp.up_proj",
        "output.dense": "mlp.down_proj",
        "mlp.fc1": "mlp.up_proj",
        "mlp.fc2": "mlp.down_proj",
        "vit.encoder.layer.": "model.layers.",
        "vit.layers.": "model.layers.",
    }
    tensors = {}
    for name, tensor in theirs.state_dict().items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        tensors[name] = tensor[0] if "class_token" in name or "embed_positions" in name else tensor
    ours = LeanForImageClassification(vit(num_hidden_layers=2)).double().eval()
    ours.load_state_dict(tensors, strict=True)
    images = pixels(ours.config).double()
    assert_near(ours(pixel_values=images).logits, theirs(pixel_values=images).logits, 1e-12)


def test_the_papers_shape_has_the_stated_size_and_keeps_no_cache():
    config = preset("vit-tiny")
    shape = (config.num_hidden_layers, config.num_attention_heads, config.hidden_size, config.intermediate_size)
    assert shape == (12, 3, 192, 768)
    # Per block 12 d^2 + 13 d; patches, class token, positions; final norm; head.
    total = 12 * (12 * 192**2 + 13 * 192) + (3 * 16**2 + 1) * 192 + 192 + 197 * 192 + 2 * 192 + 10 * 193
    assert count_parameters(config).total == total == 5_526_346
    assert f"{count_parameters(preset('vit-tiny', num_labels=100)).total / 1e6:.1f}M" == "5.5M"
    assert count_parameters(config).non_embedding == 12 * (12 * 192**2 + 13 * 192) + 2 * 192
    # Eleven layers without one of three value heads.
    assert total - count_parameters(preset("vit-tiny", "skipv1")).total == 11 * 64 * 193
    assert kv_bytes_per_token(config) == 0
    paper = recipe("vit-tiny")
    assert (paper.steps, paper.batch_size, paper.warmup_steps, paper.weight_decay) == (15_000, 1024, 1500, 0.1)
    assert (paper.learning_rate, paper.min_learning_rate, paper.beta1, paper.beta2) == (1e-3, 1e-4, 0.9, 0.999)


def test_variants_of_one_seed_start_from_the_same_point():
    started = {}
    for name in ("", "skipv1", "nonlinear-query"):
        torch.manual_seed(1)
        model = LeanForImageClassification(vit(*filter(None, [name])))
        started[name] = {name: p.detach() for name, p in model.named_parameters()}
    for name in ("skipv1", "nonlinear-query"):
        for tensor in started[""].keys() & started[name].keys():
            rows = started[name][tensor].shape[0]
            assert torch.equal(started[""][tensor][:rows], started[name][tensor]), tensor
    assert started[""]["model.embed_patches.class_token"].abs().max() > 0


@pytest.mark.parametrize("overrides", [{}, {"mlp_type": "moe", "num_local_experts": 3, "mlp_bias": False}], ids=str)
def test_accumulated_losses_sum_to_the_batchs(overrides):
    config = vit(**overrides, router_aux_loss_coef=0.0) if overrides else vit()
    model = randomize(LeanForImageClassification(config)).double().eval()
    images, labels = pixels(config, 6), torch.arange(6) % 3
    whole = model(pixel_values=images, labels=labels)
    assert_near(whole.loss, torch.nn.functional.cross_entropy(whole.logits, labels), 1e-12)
    parts = [
        model(pixel_values=images[part], labels=labels[part], num_items_in_batch=torch.tensor(6)).loss
        for part in (slice(0, 2), slice(2, 6))
    ]
    assert_near(sum(parts), whole.loss, 1e-12)


def test_experts_are_balanced():
    config = vit(mlp_type="moe", num_local_experts=3, mlp_bias=False, router_aux_loss_coef=0.5)
    model = randomize(LeanForImageClassification(config)).double().eval()
    output = model(pixel_values=pixels(config), labels=torch.tensor([0, 1]))
    cross_entropy = torch.nn.functional.cross_entropy(output.logits, torch.tensor([0, 1]))
    assert output.loss > cross_entropy + 0.5 * 0.9, "even routing costs E times sum 1/E 1/E = 1, uneven one more"


def test_hidden_states_attention_weights_and_checkpointing():
    config = vit("skipv1", attention_dropout=0.0)
    model = randomize(LeanForImageClassification(config)).double()
    model.set_attn_implementation("eager")
    output = model(pixel_values=pixels(config), output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 4
    assert output.hidden_states[0].shape == (2, 5, 16)
    assert torch.equal(model.classifier(output.hidden_states[-1][:, 0]), output.logits)
    assert (output.attentions[0] > 0).all(), "every token sees every other"
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.train().zero_grad()
        model(pixel_values=pixels(config), labels=torch.tensor([0, 1])).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert_near(gradients[1][name], gradient, 1e-12, name, 1e-6)
    assert model.get_input_embeddings() is model.model.embed_patches


LOAD_WITHOUT_THE_PACKAGE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "leanqkv":
            raise ImportError("leanqkv is not installed here")

sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
wanted = torch.load(f"{sys.argv[1]}/wanted.pt")
with torch.no_grad():
    assert torch.equal(model(pixel_values=wanted["pixels"]).logits, wanted["logits"])
assert "leanqkv" not in sys.modules
"""


@pytest.mark.slow
def test_saved_is_loaded_with_and_without_the_package(tmp_path):
    config = vit("skipv1", "nonlinear-query", num_labels=2)
    model = randomize(LeanForImageClassification(config)).eval()
    images = pixels(config)
    with torch.no_grad():
        logits = model(pixel_values=images).logits
    model.save_pretrained(tmp_path)
    for loaded in (
        LeanForImageClassification.from_pretrained(tmp_path),
        AutoModelForImageClassification.from_pretrained(tmp_path),
        load_model(open_checkpoint(tmp_path)),
    ):
        assert isinstance(loaded, LeanForImageClassification)
        assert loaded.config.num_labels == 2
        assert plan(loaded.config) == plan(config)
        assert torch.equal(loaded.eval()(pixel_values=images).logits, logits)
    base = AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(model.classifier(base(pixel_values=images).last_hidden_state[:, 0]), logits)
    torch.save({"pixels": images, "logits": logits}, tmp_path / "wanted.pt")
    run = subprocess.run(
        [sys.executable, "-c", LOAD_WITHOUT_THE_PACKAGE, str(tmp_path)],
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize(
    "config", [preset("vit-tiny"), vit("skipv1", num_labels=2), vit(id2label={0: "a", 1: "b", 2: "c"})]
)
def test_a_configuration_is_what_it_says_it_is(config):
    assert LeanConfig(**json.loads(json.dumps(config.as_overrides()))) == config


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"image_size": None}, ("needs image_size",)),
    ({"patch_size": 3}, ("patch_size (3)", "divide", "image_size (4)")),
    ({"patch_size": 0}, ("patch_size", "0")),
    ({"num_channels": 0}, ("num_channels", "0")),
    ({"num_labels": 1}, ("num_labels", "at least 2", "1")),
    ({"id2label": {0: "a", 1: "b"}}, ("num_labels (3)", "id2label (2)")),
    ({"vocab_size": 100}, ("vocab_size", "no vocabulary")),
    ({"tie_word_embeddings": True}, ("tie_word_embeddings", "no vocabulary")),
    ({"pad_token_id": 0}, ("pad_token_id", "no vocabulary")),
    ({"max_position_embeddings": 64}, ("max_position_embeddings (64)", "4 patches, 5")),
    ({"problem_type": "regression"}, ("problem_type", "'regression'")),
    ({"mask_type": "causal"}, ("bidirectionally", "'causal'")),
    ({"sliding_window": 2}, ("sliding_window", "'bidirectional'")),
]


@pytest.mark.parametrize(("overrides", "parts"), REFUSED, ids=str)
def test_a_configuration_without_meaning_is_refused(overrides, parts):
    with pytest.raises((LeanError, ConfigError)) as refused:
        vit(**overrides)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize("name", ["image_size", "patch_size", "num_channels", "num_labels"])
def test_text_has_no_pixels(name):
    with pytest.raises(ConfigError, match=f"{name} needs task 'image_classification', found 'causal_lm'"):
        preset("tiny", **{name: 4})


def test_wrong_inputs_are_refused():
    config = vit()
    model = LeanForImageClassification(config)
    images = pixels(config)
    for wrong, message in (
        ({"pixel_values": images[:, :1]}, r"\[2, 4, 4\].*found \[2, 1, 4, 4\]"),
        ({"pixel_values": images[0]}, r"found \[2, 4, 4\]"),
        ({"pixel_values": torch.zeros(2, 2, 4, 4, dtype=torch.uint8)}, "uint8"),
        ({"pixel_values": images, "attention_mask": torch.ones(2, 5)}, "attention_mask"),
        ({"pixel_values": images, "input_ids": torch.ones(2, 5, dtype=torch.long)}, "input_ids"),
        ({"pixel_values": None}, "takes pixel_values"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**wrong)
    text = LeanForCausalLM(preset("tiny", num_hidden_layers=1))
    with pytest.raises(ValueError, match="pixel_values need a model of images"):
        text(pixel_values=images)
    with pytest.raises(ConfigError, match="LeanForCausalLM builds models of task 'causal_lm'"):
        LeanForCausalLM(config)


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANQKV_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield prepare_images()


def test_digits_are_split_once_and_for_all(digits):
    assert (digits.train_images, digits.test_images, digits.labels) == (1198, 599, tuple("0123456789"))
    images, classes = (np.concatenate(parts) for parts in zip(digits.train(), digits.test(), strict=True))
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == np.uint8
    assert (images.min(), images.max()) == (0, 255)
    from sklearn.datasets import load_digits

    theirs = load_digits()

    def rows(pictures, numbers):
        return sorted((*picture.ravel().tolist(), number) for picture, number in zip(pictures, numbers, strict=True))

    assert rows(images, classes) == rows((theirs.images * 255 / 16).round().astype(int), theirs.target.tolist())
    assert prepare_images("digits") == digits
    assert "directory" not in digits.record()


def test_a_plan_goes_through_all_images_in_every_epoch():
    arguments = {"train_images": 10, "test_images": 7, "batch_size": 4, "evaluation_images": 7}
    whole = make_image_plan(**arguments, steps=5, seed=0)
    order = whole.train_starts[:]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert not np.array_equal(order[:10], order[10:])
    assert whole.evaluation_starts.tolist() == list(range(7))
    longer = make_image_plan(**arguments, steps=6, seed=0)
    assert np.array_equal(longer.train_starts[:20], whole.train_starts[:])
    other = make_image_plan(**{**arguments, "evaluation_images": 3}, steps=5, seed=1)
    assert not np.array_equal(other.train_starts[:], whole.train_starts[:])
    part = make_image_plan(**{**arguments, "evaluation_images": 3}, steps=5, seed=0).evaluation_starts
    assert np.array_equal(other.evaluation_starts, part), "the same for every seed"
    assert len(set(part)) == 3


def test_pixels_are_scaled_and_resized():
    images, classes = np.array([[[[0, 255], [51, 204]]]], dtype="uint8"), np.array([4])
    batch = image_batch(images, classes, [0, 0])
    assert_near(scaled_pixels(batch["pixel_values"], 2)[1, 0], torch.tensor([[-1.0, 1.0], [-0.6, 0.6]]), 1e-6)
    assert batch["labels"].tolist() == [4, 4]
    larger = scaled_pixels(batch["pixel_values"][:1], 4)
    assert larger.shape == (1, 1, 4, 4)
    assert larger[0, 0, 0].tolist() == [-1.0, -0.5, 0.5, 1.0]


def write_images(folder: Path, columns: dict[str, Any], counts: dict[str, int], mode: str = "RGB", size: int = 6):
    """A data set as it lies on the hub: a card that names its features, and Parquet files with PNG images in them."""
    rng = np.random.default_rng(0)
    features = datasets.Features({"img": datasets.Image(), **columns})
    classes = {name: kind.num_classes for name, kind in columns.items()}
    shape = (size, size) if mode == "L" else (size, size, 3)
    for split, count in counts.items():
        rows = [
            {
                "img": Image.fromarray(rng.integers(0, 256, shape).astype("uint8")),
                **{name: i % number for name, number in classes.items()},
            }
            for i in range(count)
        ]
        file = folder / "plain_text" / f"{split}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows, features=features).to_parquet(file)
    card = ["---", "dataset_info:", "  config_name: plain_text", "  features:", "  - name: img", "    dtype: image"]
    for name, kind in columns.items():
        card += [f"  - name: {name}", "    dtype:", "      class_label:", "        names:"]
        card += [f"          '{i}': {label}" for i, label in enumerate(kind.names)]
    card += ["configs:", "- config_name: plain_text", "  default: true", "  data_files:"]
    card += [line for split in counts for line in (f"  - split: {split}", f"    path: plain_text/{split}-*")]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))
    return folder


CIFAR = {"label": datasets.ClassLabel(names=["cat", "dog", "ship"])}
CIFAR_100 = {
    "coarse_label": datasets.ClassLabel(names=["animal", "thing"]),
    "fine_label": datasets.ClassLabel(names=["cat", "dog", "ship", "car"]),
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_data_set_of_images_is_read_as_the_hub_has_it(cache):
    folder = write_images(cache / "cifar", CIFAR, {"train": 8, "test": 3})
    data = prepare_images(str(folder))
    assert (data.train_images, data.test_images, data.channels, data.height) == (8, 3, 3, 6)
    assert data.labels == ("cat", "dog", "ship")
    assert data.description == "cifar"
    record = datasets.load_dataset(str(folder))["test"][2]
    images, classes = data.test()
    assert np.array_equal(images[2].transpose(1, 2, 0), np.asarray(record["img"]))
    assert classes.tolist() == [0, 1, 2]
    again = prepare_images(str(folder))
    assert again == data


def test_the_finest_classes_are_taken_and_a_missing_test_split_is_cut_off(cache):
    folder = write_images(cache / "cifar100", CIFAR_100, {"train": 12}, mode="L")
    data = prepare_images(str(folder))
    assert (data.train_images, data.test_images, data.channels) == (8, 4, 1)
    assert data.labels == ("cat", "dog", "ship", "car")
    assert data.description == "cifar100, fine_label"
    assert sorted(np.concatenate([data.train()[1], data.test()[1]]).tolist()) == sorted([0, 1, 2, 3] * 3)


def test_what_is_no_data_set_of_images_is_refused(cache):
    with pytest.raises(LeanError, match="there is no such folder"):
        prepare_images("./nowhere")
    with pytest.raises(LeanError, match="no dataset of that name can be loaded"):
        prepare_images("cifar10")  # offline
    (cache / "empty").mkdir()
    with pytest.raises(LeanError, match="the folder cannot be read"):
        prepare_images(str(cache / "empty"))
    text = cache / "text"
    text.mkdir()
    datasets.Dataset.from_dict({"text": ["a", "b"]}).to_parquet(text / "train.parquet")
    with pytest.raises(LeanError, match=r"not one column of images.*found: text: Value"):
        prepare_images(str(text))
    with pytest.raises(LeanError, match=r"no split called train \(found: test\)"):
        prepare_images(str(write_images(cache / "test-only", CIFAR, {"test": 3})))
    mixed = write_images(cache / "mixed", CIFAR, {"train": 3})
    write_images(mixed, CIFAR, {"test": 3}, size=5)
    card = (mixed / "README.md").read_text()
    (mixed / "README.md").write_text(
        card.replace("  - split: test", "  - split: train\n    path: plain_text/train-*\n  - split: test")
    )
    with pytest.raises(LeanError, match="different sizes, 6x6 and 5x5"):
        prepare_images(str(mixed))
    assert not list((cache / "cache").rglob("data.json")), "nothing half-made is kept"


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        (
            (Image.fromarray(np.arange(36, dtype="uint16").reshape(6, 6) * 999),),
            "images of mode I;16; make them of 8 bits",
        ),
        ((Image.new("L", (6, 6)), Image.new("RGB", (6, 6))), "images in gray and in colour"),
        ((Image.new("RGB", (6, 6)), b"\x89PNG cut off"), "image 1 cannot be decoded"),
        ((b"no image", Image.new("RGB", (6, 6))), "image 0 cannot be decoded"),
    ],
)
def test_pixels_that_would_become_others_are_refused(cache, pictures, message):
    folder = cache / "pictures" / "train" / "cat"
    folder.mkdir(parents=True)
    (folder.parent / "dog").mkdir()
    for number in range(6):
        picture = pictures[number % len(pictures)]
        file = (folder if number < 3 else folder.parent / "dog") / f"{number}.png"
        file.write_bytes(picture) if isinstance(picture, bytes) else picture.save(file)
    with pytest.raises(LeanError, match=message):
        prepare_images(str(cache / "pictures"))
    assert not list((cache / "cache").rglob("data.json"))


# --- training ---------------------------------------------------------------------------------------------------------

SMALL = "vit-digits+hidden_size=32+intermediate_size=64+num_hidden_layers=2"


def spec(data, name: str = SMALL, **changes: Any) -> RunSpec:
    config = preset(name)
    made = RunSpec(
        name=name,
        config=config.as_overrides(),
        recipe=recipe(name, steps=80, batch_size=32, learning_rate=4e-3),
        seed=0,
        context_length=config.max_position_embeddings,
        precision="fp32",
        data_sha256=data.sha256,
        evaluation_sequences=data.test_images,
        evaluate_every=40,
    )
    return replace(made, **changes)


@pytest.fixture(scope="module")
def finished(digits, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, train(spec(digits), digits, out, device="cpu")


@pytest.mark.slow
def test_a_run_learns_and_its_directory_holds_what_the_record_says(digits, finished):
    out, record = finished
    assert [at["step"] for at in record["evaluations"]] == [40, 80]
    assert record["final"]["accuracy"] > 0.3, "one in ten by chance"
    assert record["evaluations"][-1] == {
        "step": 80,
        "loss": record["final"]["validation_loss"],
        "accuracy": record["final"]["accuracy"],
    }
    assert record["tokens"] == 80 * 32 * 17
    assert record["batch_plan"]["evaluation_sequences"] == 599
    assert record["data"]["train_images"] == 1198
    model = load_model(open_checkpoint(out))
    assert model.config.id2label[7] == "7"
    losses, hits = image_outcomes(model, *digits.test(), range(599), 8, batch_size=32)
    assert losses.mean().item() == record["final"]["validation_loss"]
    assert hits.double().mean().item() == record["final"]["accuracy"]
    images, classes = digits.test()
    processor = AutoImageProcessor.from_pretrained(out)
    picture = processor(Image.fromarray(images[5][0]), return_tensors="pt").pixel_values
    assert torch.equal(picture, scaled_pixels(image_batch(images, classes, [5])["pixel_values"], 8))


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_identically(digits, finished, tmp_path):
    class Killed(BaseException):
        """Nothing in the training code catches it."""

    def kill(step, *_):
        if step == 57:
            raise Killed

    with pytest.raises(Killed):
        train(spec(digits), digits, tmp_path / "run", device="cpu", progress=kill)
    first = []
    again = train(spec(digits), digits, tmp_path / "run", device="cpu", progress=lambda step, *_: first.append(step))
    assert first[0] == 41
    for key in ("training", "evaluations", "final"):
        assert again[key] == finished[1][key]
    for name, tensor in load_file(finished[0] / "model.safetensors").items():
        assert torch.equal(tensor, load_file(tmp_path / "run" / "model.safetensors")[name]), name


@pytest.mark.slow
def test_accumulation_gives_the_gradient_of_the_whole_batch(digits, finished, tmp_path):
    parts = train(spec(digits, micro_batch_size=16), digits, tmp_path / "run", device="cpu")
    for one, other in zip(finished[1]["training"], parts["training"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-3)  # sums in float32, in another order, 80 steps long


def test_data_of_the_wrong_kind_or_shape_is_refused(digits, tmp_path):
    text = spec(digits, config=preset("tiny").as_overrides(), name="tiny")
    with pytest.raises(LeanError, match=r"tiny is a model of text, the data \(digits \(scikit-learn\)\) is images"):
        train(text, digits, tmp_path / "run", device="cpu")
    for field, message in (
        ("num_labels=5", r"10 classes, .* 5; give it as .*\+num_labels=10"),
        ("num_channels=3", r"1 channels, .* 3; give it as .*\+num_channels=1"),
    ):
        with pytest.raises(LeanError, match=message):
            train(spec(digits, f"vit-digits+{field}"), digits, tmp_path / "run", device="cpu")
    with pytest.raises(LeanError, match="cuts an image into 17 tokens, not 8"):
        train(spec(digits, context_length=8), digits, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_precisions_are_timed_on_images(monkeypatch):
    monkeypatch.setattr("leanqkv.train.precision.TIMED_STEPS", 1)
    monkeypatch.setattr("leanqkv.train.precision.Precision.apply", lambda *_: None)
    chosen = choose_precision(vit(), steps=10**6, batch_size=2, context_length=5, device="cpu")
    assert len(chosen.timings) == 6


# --- on the command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def cli(cli, monkeypatch, cache):
    """In a folder of its own, one run at a time."""
    monkeypatch.chdir(cache)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("leanqkv.compare.comparison.available_cores", lambda: 1)
    return cli


def test_train_inspect_and_what_they_refuse(cli, cache):
    folder = write_images(cache / "cifar", CIFAR, {"train": 8, "test": 3})
    model = f"{SMALL}+num_channels=3+num_labels=3+image_size=12+patch_size=4"
    options = ("--precision", "fp32", "--steps", "2", "--batch-size", "4", "--device", "cpu")
    code, out, err = cli("train", model, "--data", str(folder), *options, "--out", "run")
    assert code == 0, err
    assert "8 training and 3 test images" in out
    assert "test accuracy" in out
    assert json.loads(Path("run/config.json").read_text())["id2label"]["2"] == "ship"
    code, out, _ = cli("inspect", "run")
    assert code == 0
    assert "KV cache: none" in out
    for arguments, message in (
        (("generate", "run", "--prompt", "a"), "image_classification, which does not predict the next token"),
        (("train", model, "--data", str(folder), *options, "--tokenizer", "x", "--out", "b"), "--tokenizer is about"),
        (("train", SMALL, "--data", str(folder), *options, "--out", "b"), "3 channels"),
        (("train", SMALL, *options, "--context-length", "9", "--out", "b"), "leave out --context-length"),
        (("compare", "tiny", SMALL, *options, "--out", "b"), "cannot be compared with each other"),
    ):
        code, _, err = cli(*arguments)
        assert code == 2, arguments
        assert message in " ".join(err.split()), arguments
        assert len(err.splitlines()) == 1
        assert not Path("b").exists()


@pytest.mark.slow
def test_uptraining_a_model_of_images(cli, cache):
    options = ("--precision", "fp32", "--batch-size", "8", "--device", "cpu")
    assert cli("train", SMALL, "--steps", "2", *options, "--out", "run")[0] == 0
    code, _, err = cli("uptrain", "run", "--steps", "2", *options, "--out", "longer")
    assert (code, err) == (0, "")
    before, after = (json.loads(Path(directory, "record.json").read_text()) for directory in ("run", "longer"))
    assert after["evaluations"][0] == {"step": 0, **{k: v for k, v in before["evaluations"][-1].items() if k != "step"}}
    code, _, err = cli("uptrain", "run", "--steps", "2", *options, "--teacher", "run", "--out", "taught")
    assert code == 2 and "--teacher is for models of text" in err


@pytest.mark.slow
def test_models_of_images_are_compared_by_their_accuracy(cli):
    arguments = ("compare", SMALL, f"{SMALL}+skipv1", "--seeds", "2", "--steps", "6", "--batch-size", "16")
    code, out, err = cli(*arguments, "--precision", "fp32", "--evaluate-every", "3", "--out", "both")
    assert code == 0, err
    assert "test accuracy" in out
    comparison = load_comparison("both")
    first, second = comparison.results
    assert len(first.scores) == 2
    assert first.scores == {seed: run.final["accuracy"] for seed, run in first.finals.items()}
    assert second.difference.by_seed[1] == second.scores[1] - first.scores[1]
    assert {run.batch_plan["evaluation_sequences"] for run in comparison.finals} == {599}
    table = markdown(comparison)
    assert "| test accuracy mean (s.d.) |" in table
    assert "validation loss" not in table
    page = write_report("both").read_text()
    for text in ("Test accuracy during training", "1,198 to train on, 599 to test on", "16 images of 17 tokens"):
        assert text in page
    assert "perplexity" not in page
