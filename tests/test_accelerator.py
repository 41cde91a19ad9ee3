"""Everything on an accelerator, where one is there: what a CPU computes, every architecture, every command."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from corpus import SHAPE, write_corpus
from shapes import assert_near, tokens
from variants import ALL, Variant

from leanqkv import LeanForCausalLM, cache_bytes, kv_bytes_per_token
from leanqkv.checkpoints.open import load_model, open_causal_lm
from leanqkv.environment import default_device
from leanqkv.inference import Decoder
from leanqkv.model.cache_quantized import LeanQuantizedCache

DEVICE = default_device()
DTYPE = torch.float32 if DEVICE == "mps" else torch.float64  # MPS has no float64
NEW = 8
pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs an accelerator")
every = pytest.mark.parametrize("variant", ALL, ids=str)


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    """Products in float32 are not rounded to TF32, by which they would differ from a CPU's."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on_both(variant: Variant) -> tuple[LeanForCausalLM, LeanForCausalLM]:
    return tuple(variant.trained().to(device, DTYPE) for device in ("cpu", DEVICE))  # type: ignore[return-value]


def rounding(variant: Variant) -> float:
    """What sums of some hundred terms, taken in another order, leave after a few layers of large weights, forward and
    backward. Tables of rotary positions are float32 in every dtype: sines of two devices differ in their last digit."""
    dtype = torch.float32 if variant.config().position_embedding_type == "rope" else DTYPE
    return (1000 if dtype == torch.float32 else 10_000) * torch.finfo(dtype).eps


@every
def test_logits_and_gradients_are_those_of_a_cpu(variant: Variant) -> None:
    ids, models, near = tokens(2, 9), on_both(variant), rounding(variant)
    expected, found = (model(input_ids=ids.to(model.device)).logits for model in models)
    assert_near(found.cpu(), expected, near, "logits")
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=DTYPE)
    for logits in (expected, found):
        logits.backward(direction.to(logits.device))
    largest = max(p.grad.abs().max().item() for p in models[0].parameters())
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert_near(other.grad.cpu(), one.grad, near, name, floor=largest)


@every
def test_tokens_and_bytes_are_those_of_a_cpu(variant: Variant) -> None:
    """Padded on the left, by `generate` and by the decoder, from a cache of the plan's size."""
    on_cpu, model = on_both(variant)
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    ids[0, :3] = 0
    with torch.no_grad():
        expected = on_cpu.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        found = model.generate(ids.to(DEVICE), attention_mask=mask.to(DEVICE), max_new_tokens=NEW, do_sample=False)
    assert found.tolist() == expected.tolist()
    decoder = Decoder(model, chunk=4)
    assert decoder.generate(ids.to(DEVICE), mask.to(DEVICE), max_new_tokens=NEW).tolist() == expected.tolist()
    if variant.config().sliding_window is None:
        length = ids.shape[1] + NEW - 1
        assert cache_bytes(decoder.cache) == 2 * length * kv_bytes_per_token(variant.config(), dtype=DTYPE)


@every
def test_half_precision_stays_near(variant: Variant) -> None:
    """In bfloat16 the same model on both, as far apart as each is from float64 at most, twice."""
    ids, models = tokens(2, 9), on_both(variant)
    with torch.no_grad():
        exact = models[0](input_ids=ids).logits
        halves = [m.bfloat16()(input_ids=ids.to(m.device)).logits.to("cpu", DTYPE) for m in models]
    errors = [(half - exact).square().mean().sqrt() for half in halves]
    assert errors[1] <= 2 * errors[0] + torch.finfo(torch.bfloat16).eps * exact.abs().max()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpus.txt and `source`, trained on the device by the command."""
    place = tmp_path_factory.mktemp("accelerator")
    write_corpus(place / "corpus.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANQKV_CACHE", str(place / "cache"))
        patch.chdir(place)
        run("train", f"tiny{SHAPE}", "--data", "corpus.txt", "--steps", "40", "--batch-size", "8", "--out", "run")
        yield place


def run(*arguments: str) -> None:
    from leanqkv.cli import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["leanqkv", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, arguments


def loss_of(checkpoint: str, *options: str) -> float:
    out = Path(f"{checkpoint}-{len(list(Path().iterdir()))}.json".replace("/", "-"))
    run("eval", checkpoint, "--data", "corpus.txt", "--precision", "fp32", *options, "--out", str(out))
    return json.loads(out.read_text())["figures"]["loss"]


def test_training_runs_there_and_says_so(trained: Path) -> None:
    record = json.loads((trained / "run" / "record.json").read_text())
    assert torch.cuda.get_device_name() in json.dumps(record) if DEVICE == "cuda" else DEVICE in json.dumps(record)
    assert record["final"]["validation_loss"] < 4.5  # log 300 is 5.7


CONVERSIONS = [
    ("--cache", "75%"),
    ("--cache", "50%"),
    ("--to", "merged-values"),
]


@pytest.mark.parametrize("options", CONVERSIONS, ids=" ".join)
def test_a_conversion_calibrated_there_loses_what_one_on_a_cpu_loses(trained: Path, options: tuple[str, ...]) -> None:
    given = ("--calibration", "corpus.txt", "--tokens", "2000")
    losses = []
    for device in ("cpu", DEVICE):
        out = f"{options[-1].rstrip('%')}-{device}"
        run("convert", "run", *options, *given, "--device", device, "--out", out)
        losses.append(loss_of(out, "--device", DEVICE))
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)


def test_losses_are_those_of_a_cpu(trained: Path) -> None:
    assert loss_of("run", "--device", DEVICE) == pytest.approx(loss_of("run", "--device", "cpu"), abs=1e-5)


def test_quantized_caches_hold_the_same_tokens(trained: Path) -> None:
    model = load_model(open_causal_lm(Path("run")), torch.float32)
    ids, tokens_of = tokens(2, 20, vocab_size=300), []
    for device in ("cpu", DEVICE):
        cache = LeanQuantizedCache("kivi", model.config, key_bits=8, value_bits=4)
        there = model.to(device)
        with torch.no_grad():
            tokens_of.append(there.generate(ids.to(device), past_key_values=cache, max_new_tokens=NEW, do_sample=False))
    assert tokens_of[0].tolist() == tokens_of[1].tolist()


def test_the_other_commands_run_there(trained: Path) -> None:
    prompt = ("--prompt", "the quick brown", "--max-new-tokens", "5")
    run("generate", "run", *prompt, "--device", DEVICE)
    models = ("run", f"tiny+skipv1{SHAPE}")
    small = ("--context", "16", "--batch", "1,2", "--new-tokens", "4", "--rounds", "1")
    run("bench", *models, *small, "--device", DEVICE, "--out", "bench")
    training = ("--data", "corpus.txt", "--seeds", "2", "--steps", "20", "--batch-size", "8", "--precision", "bf16")
    run("compare", f"tiny{SHAPE}", f"tiny+skipv1{SHAPE}", *training, "--jobs", "2", "--out", "pair")
    run("eliminate", "run", "--remove", "block-diagonal", "--out", "less")
    assert loss_of("less", "--device", DEVICE) == pytest.approx(loss_of("run", "--device", DEVICE), abs=1e-4)
