"""A checkpoint's folder has the code that its configuration needs, and no more; it loads where leanqkv is not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from shapes import randomize, tiny, tokens

import leanqkv
from leanqkv import LeanConfig, LeanForCausalLM, LeanForImageClassification, LeanForMaskedLM, LeanModel, preset
from leanqkv.presets.catalog import MECHANISMS

CODE = Path(leanqkv.__file__).parent / "model"
# Files more than a baseline's. A mechanism has one of its own; nothing else is there.
BASELINE = 12
MORE = {
    **dict.fromkeys(MECHANISMS, 1),
    **dict.fromkeys(("gqa", "mqa"), 0),
    **dict.fromkeys(("latent-keys", "latent-values", "values-from-keys", "mla"), 2),
}
DEEPER = {name: {"num_hidden_layers": 6} for name in MECHANISMS}
MOE = {"mlp_type": "moe", "num_local_experts": 3, "router_aux_loss_coef": 0.5}
PLAIN = {"baseline": (), "old": ("skipv1",)}
OTHERS: dict[str, tuple[LeanConfig, Any, int]] = {
    "experts": (tiny("llama", **MOE), LeanForCausalLM, 1),
    "latents": (tiny("llama", "latent-keys", "values-from-keys", "gqa"), LeanForCausalLM, 2),
    "latent and skipv1": (tiny("llama", "mla", "skipv1"), LeanForCausalLM, 3),
    "mlp-query in layer 0": (tiny("gpt", "mlp-query:layers=0"), LeanForCausalLM, 1),
    "body": (tiny("gpt"), LeanModel, -2),
    "encoder": (tiny("gpt", task="masked_lm"), LeanForMaskedLM, -1),
    "images": (preset("vit-digits", num_hidden_layers=2), LeanForImageClassification, 0),
}


def code_of(folder: Path) -> set[str]:
    return {file.name for file in folder.glob("*.py")}


@pytest.mark.parametrize("name", ["baseline", *MECHANISMS])
def test_a_mechanism_brings_its_own_files(name: str, tmp_path: Path) -> None:
    config = tiny("llama", *([] if name == "baseline" else [name]), **DEEPER.get(name, {}))
    config.architectures = ["LeanForCausalLM"]
    config.save_pretrained(tmp_path)
    assert len(code_of(tmp_path)) == BASELINE + MORE.get(name, 0), sorted(code_of(tmp_path))
    assert code_of(tmp_path) <= code_of(CODE)


LOAD = """
import json, sys
from pathlib import Path

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "leanqkv":
            raise ImportError("leanqkv is not installed here")

sys.meta_path.insert(0, Blocked())
import torch
import transformers

torch.set_num_threads(1)
for folder, auto_class in json.loads(sys.argv[1]).items():
    wanted = torch.load(f"{folder}/wanted.pt")
    read = getattr(transformers, auto_class).from_pretrained
    model = read(folder, trust_remote_code=True).eval()
    assert type(model.config).has_no_defaults_at_init, folder  # transformers before 5.20 would make them
    model.save_pretrained(f"{folder}/again")
    code = [sorted(file.name for file in Path(place).glob("*.py")) for place in (folder, f"{folder}/again")]
    if not Path(folder, "old").exists():
        assert code[0] == code[1], folder
    for one in (model, read(f"{folder}/again", trust_remote_code=True).eval()):
        with torch.no_grad():
            assert torch.equal(one(**wanted["inputs"])[0], wanted["output"]), folder
assert "leanqkv" not in sys.modules
"""


@pytest.mark.slow
def test_the_code_alone_computes_the_same(tmp_path: Path) -> None:
    """In a process that cannot import leanqkv, bit for bit, and when it is saved there again. Older folders, which have
    all files of the model, too."""
    cases = {
        "baseline": (tiny("llama"), LeanForCausalLM, 0),
        **OTHERS,
        "old": (tiny("gpt", "skipv1"), LeanForCausalLM, 0),
    }
    classes = {}
    for number, (name, (config, cls, more)) in enumerate(cases.items()):
        folder = tmp_path / f"model{number}"
        model = randomize(cls(config)).eval()
        images = {"pixel_values": torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))}
        inputs = images if name == "images" else {"input_ids": tokens(2, 6)}
        model.save_pretrained(folder)
        with torch.no_grad():
            torch.save({"inputs": inputs, "output": model(**inputs)[0]}, folder / "wanted.pt")
        if name == "old":
            (folder / "old").touch()
            for file in CODE.glob("*.py"):
                shutil.copyfile(file, folder / file.name)
        else:
            assert len(code_of(folder)) == BASELINE + more, (name, sorted(code_of(folder)))
        auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
        classes[str(folder)] = next(auto for auto, place in auto_map.items() if place.endswith(f".{cls.__name__}"))
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": ""}
    command = [sys.executable, "-c", LOAD, json.dumps(classes)]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
