"""The model card of every finished directory: what it says, where that comes from, and that its code runs."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from corpus import SHAPE, write_corpus
from huggingface_hub import ModelCard
from shapes import randomize, tiny

import experiments.vision  # noqa: F401, models of images are trained here too
from leanqkv.checkpoints.card import card, origin
from leanqkv.model.causal_lm import LeanForCausalLM

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path, monkeypatch):
    write_corpus(tmp_path / "corpus.txt")
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parts(directory):
    text = Path(directory, "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert ModelCard(text).data.to_dict()["library_name"] == "transformers"
    assert str(Path.cwd()) not in text, "the path of a machine"
    return yaml.safe_load(front), " ".join(body.split())


def loaded(directory):
    """What the card's code loads."""
    (code,) = re.findall(r"```python\n(.*?)```", Path(directory, "README.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    return names


TRAIN = ("--data", "corpus.txt", "--steps", "4", "--device", "cpu", "--precision", "fp32", "--evaluate-every", "2")


def test_from_training_to_elimination(place, cli):
    """Each card says what was done, and the licence goes along."""
    model = f"tiny{SHAPE}"
    assert cli("train", model, *TRAIN, "--out", "trained")[0] == 0
    record = json.loads(Path("trained/record.json").read_text())
    front, body = parts("trained")
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["leanqkv", "kv-cache"]}
    assert f"`{model}`, trained with leanqkv from new weights: 4 steps of" in body
    assert f"| validation loss, nats | {record['final']['validation_loss']:.4f} |" in body
    assert f"| parameters | {record['parameters']['total']:,} |" in body
    assert "No licence is known for these weights" in body
    assert type(loaded("trained")["model"]).__name__ == "LeanForCausalLM"

    card_file = Path("trained/README.md")
    card_file.write_text(card_file.read_text().replace("---\n", "---\nlicense: mit\n", 1))
    convert = ("convert", "trained", "--to", "skipv1", "--method", "top-v", "--out", "converted")
    code, _, err = cli(*convert)
    assert code == 0, err
    front, body = parts("converted")
    assert (front["base_model"], front["license"]) == ("trained", "mit")
    assert "No licence" not in body

    assert cli("uptrain", "converted", *TRAIN, "--out", "uptrained")[0] == 0
    front, body = parts("uptrained")
    assert (front["base_model"], front["license"]) == ("trained", "mit")
    assert "trained with leanqkv from the weights of trained: 4 steps" in body

    assert cli("eliminate", "trained", "--remove", "block-diagonal", "--out", "fewer")[0] == 0
    certificate = json.loads(Path("fewer/certificate.json").read_text())
    front, body = parts("fewer")
    before, after = certificate["parameters"].values()
    assert f"{before:,} parameters became {after:,}" in body and front["base_model"] == "trained"
    expected = loaded("trained")["model"]
    found = loaded("fewer")["model"]
    ids = torch.arange(8)[None]
    assert torch.allclose(found(ids).logits, expected(ids).logits, atol=1e-4)


def test_a_licence_goes_along_with_the_weights(place, cli):
    """Whatever makes a directory of another one; there is no tokenizer here, and no card loads one."""
    randomize(LeanForCausalLM(tiny("llama"))).save_pretrained("plain")
    licence = {"license": "other", "license_name": "own", "license_link": "https://example.com/licence"}
    made = {
        "stock": ("export", "plain"),
        "imported": ("import", "stock"),
        "converted": ("convert", "imported", "--to", "gqa"),
        "fewer": ("eliminate", "converted", "--remove", "block-diagonal"),
    }
    Path("plain/README.md").write_text(f"---\n{yaml.safe_dump(licence)}---\n")
    for name, command in made.items():
        code, _, err = cli(*command, "--out", name)
        assert code == 0, err
        front, body = parts(name)
        assert {field: front[field] for field in licence} == licence and front["base_model"] == "plain", name
        assert "No licence" not in body and ("trust" in body) == (name != "stock")
        assert "AutoTokenizer" not in body, name
    assert type(loaded("stock")["model"]).__name__ == "LlamaForCausalLM"
    assert cli("import", "stock", "--dtype", "bf16", "--out", "rounded")[0] == 0
    assert "The weights of plain in another format, stored in bfloat16." in parts("rounded")[1]


def test_a_card_that_its_owner_wrote_stays(place, cli):
    Path("run").mkdir()
    assert cli("train", f"tiny{SHAPE}", *TRAIN, "--out", "run")[0] == 0
    Path("run/README.md").write_text("mine")
    Path("run/record.json").unlink()
    assert cli("train", f"tiny{SHAPE}", *TRAIN, "--out", "run")[0] == 0
    assert Path("run/README.md").read_text() == "mine"


def test_tokens_of_others_have_no_tokenizer_in_their_code(place, cli):
    torch.randint(97, (2000,)).numpy().astype("uint16").tofile("tokens.bin")
    assert cli("train", f"tiny{SHAPE}", "--data", "tokens.bin", *TRAIN[2:], "--out", "numbers")[0] == 0
    assert "tokenizer" not in parts("numbers")[1]
    assert type(loaded("numbers")["model"]).__name__ == "LeanForCausalLM"


def test_images_have_no_tokenizer_in_their_code(place, cli):
    assert cli("train", "vit-digits+num_hidden_layers=2", "--steps", "4", "--device", "cpu", "--out", "images")[0] == 0
    front, body = parts("images")
    assert front["pipeline_tag"] == "image-classification"
    assert "tokenizer" not in body and "| test accuracy |" in body
    assert type(loaded("images")["model"]).__name__ == "LeanForImageClassification"


DATE, DEEP = "---\ndate: 2020-99-99\n---\n", "---\na: " + "[" * 5000 + "\n---\n"


def test_where_a_model_comes_from(tmp_path):
    snapshot = tmp_path / "models--HuggingFaceTB--SmolLM2-135M" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "README.md").write_text("---\nlicense: apache-2.0\nbase_model:\n- other/one\n---\n# A model")
    assert origin(snapshot) == {"base_model": "HuggingFaceTB/SmolLM2-135M", "license": "apache-2.0"}
    plain = tmp_path / "plain"
    plain.mkdir()
    assert origin(plain) == {"base_model": "plain"}
    for content in (
        "",
        "no metadata",
        "---\n: : [\n---\n",
        "---\n- a list\n---\n",
        "---\nlicense: [a, b]\n---\n",
        DATE,
        DEEP,
    ):
        (plain / "README.md").write_text(content)
        assert origin(plain) == {"base_model": "plain"}
    (plain / "README.md").write_text("---\nbase_model: someone/model\nlicense: mit\n---\n")
    assert origin(plain) == {"base_model": "plain", "license": "mit"}, "what someone trained from that is another model"
    (plain / "README.md").write_text("---\nbase_model: someone/model\ntags: [leanqkv]\n---\n")
    assert origin(plain) == {"base_model": "someone/model"}
    (plain / "README.md").write_text("\ufeff---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n")
    assert origin(plain) == {
        "base_model": "plain",
        "license": "other",
        "license_name": "own",
        "license_link": "LICENSE",
    }


def test_where_a_file_comes_from(tmp_path, monkeypatch):
    file = tmp_path / "model.Q8_0.gguf"
    file.write_bytes(b"GGUF")
    about = {"general.license": "apache-2.0", "general.base_model.0.repo_url": "https://huggingface.co/owner/base"}
    monkeypatch.setattr("leanqkv.checkpoints.card.GgufFile.open", lambda path: SimpleNamespace(metadata=about))
    assert origin(file) == {"base_model": "owner/base", "license": "apache-2.0"}
    about["general.license.link"] = "https://example.com/licence"
    assert origin(file)["license_link"] == about["general.license.link"]
    about.clear()
    assert origin(file) == {"base_model": "model.Q8_0"}


def test_a_stock_model_needs_no_trust():
    text = card("a", "causal_lm", [], {"license": "mit"}, True, "About.")
    assert "trust_remote_code" not in text and "licence" not in text and text.startswith("---\nlicense: mit\n")
