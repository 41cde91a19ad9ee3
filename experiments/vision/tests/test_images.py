"""Images: their data sets, training on them, the commands."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from shapes import assert_near
from transformers import AutoImageProcessor, ViTImageProcessor

from experiments.vision.images import _fingerprint, image_batch, prepare_images, scaled_pixels
from experiments.vision.task import image_outcomes, make_image_plan
from leanqkv import (
    LeanError,
    preset,
    recipe,
)
from leanqkv.checkpoints.open import load_model, open_checkpoint
from leanqkv.compare.records import load_comparison
from leanqkv.report.comparison import markdown
from leanqkv.report.comparison_page import KIND
from leanqkv.train.micro_batch import Step
from leanqkv.train.precision import choose_precision
from leanqkv.train.spec import RunSpec
from leanqkv.train.training import train

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


@pytest.mark.parametrize("missing", [True, False])
def test_fingerprints_follow_the_content(missing):
    def fingerprint(*values: int) -> str:
        dataset = datasets.Dataset.from_dict({"value": values})
        if missing:
            del dataset._fingerprint
        return _fingerprint(dataset)

    assert fingerprint(1, 2) == fingerprint(1, 2) != fingerprint(1, 3)


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
    # The Auto class of transformers 5.17 asks for torchvision, which nothing here needs.
    loader: Any = ViTImageProcessor if transformers.__version__.startswith("5.17.") else AutoImageProcessor
    processor = loader.from_pretrained(out)
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
    chosen = choose_precision(Step(preset(f"{SMALL}+image_size=4"), 2, 5, "cpu"), None, 10**6)
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
    page = KIND.write(Path("both")).read_text()
    for text in ("Test accuracy during training", "1,198 to train on, 599 to test on", "16 images of 17 tokens"):
        assert text in page
    assert "perplexity" not in page
