"""The command line answers at once, and the classes are registered with transformers whenever it is imported."""

import json
import os
import resource
import subprocess
import sys

import pytest

import leanqkv
from leanqkv.cli import COMMANDS

HEAVY = "accelerate datasets jinja2 matplotlib numpy pandas PIL pyarrow safetensors scipy sklearn tokenizers torch"
NO_TENSORS = f"""
import sys, json
import leanqkv
heavy = {{*{HEAVY.split()}, "huggingface_hub", "transformers"}}
assert not heavy & {{*sys.modules}}, "import leanqkv"
from leanqkv.cli import main
for line in json.loads(sys.argv[1]):
    sys.argv[1:] = line
    try:
        main()
    except SystemExit as end:
        print(end.code or 0)
    assert not heavy & {{*sys.modules}}, line
"""
OUT = ("--out", "full")
REFUSED = (
    ("nothing",),
    ("train",),
    ("train", "tiny", "--none", *OUT),
    ("train", "tiny", "--steps", "0", *OUT),
    ("train", "tiny", "--steps", "many", *OUT),
    ("train", "tiny", "--out="),
    ("train", "tiny", *OUT),
    ("uptrain", "x", "--steps", "1", *OUT),
    ("compare", "tiny", "small", *OUT),
    ("convert", "x", *OUT),
    ("convert", "x", "--out", "new", "--cache", "120%"),
    ("convert", "x", "--out", "new", "--layers", "first"),
    ("eliminate", "x", "--remove", "query", *OUT),
    ("import", "x", *OUT),
    ("export", "x", *OUT),
    ("export", "x", "--out", "new", "--format", "gguf"),
    ("frontier", "x", "--evaluate", "stdlib", *OUT),
    ("bench", "tiny", *OUT),
    ("bench", "tiny", "--batch", "none", "--out", "new"),
    ("eval", "x"),
    ("eval", "x", "--data", "stdlib", *OUT),
    ("generate", "x"),
    ("generate", "x", "--prompt", "a", "--cache-bits", "3"),
    ("bench", "tiny", "--cache-bits", "16,3", "--out", "new"),
    ("eval", "x", "--data", "stdlib", "--cache-bits", "8/16"),
    ("frontier", "x", "--evaluate", "stdlib", "--cache-bits", "1", "--out", "new"),
    ("serve", "x", "--cache-bits", "none"),
    ("serve", "x", "--engine", "none"),
)


def printed(lines, folder) -> tuple[list[str], str]:
    """The two outputs of these command lines, run in one process that may load nothing heavy."""
    command = [sys.executable, "-c", NO_TENSORS, json.dumps(lines)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines(), run.stderr


def test_help_version_and_refusals_load_no_library_of_tensors(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    asked = [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)]
    out, _ = printed([*asked, *REFUSED], tmp_path)
    assert out[0] == f"leanqkv {leanqkv.__version__}"
    codes = [line for line in out if line.isdecimal()]
    assert codes == ["0"] * len(asked) + ["2"] * len(REFUSED)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_completion_loads_only_the_commands_that_begin_so(tmp_path):
    code = (
        "import sys; sys.argv[0] = 'leanqkv'; from leanqkv.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    )
    words = {"_LEANQKV_COMPLETE": "complete_bash", "COMP_WORDS": "leanqkv tok", "COMP_CWORD": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | words, capture_output=True, text=True, check=False
    )
    found, modules = run.stdout.splitlines()
    assert found == "tokenize"
    assert not {"torch", "transformers", "leanqkv.commands.train"} & {*modules.split()}


@pytest.mark.parametrize("code, most", [("import leanqkv", 0.3), ("from leanqkv.cli import main; main()", 0.5)])
def test_cpu_seconds(code, most):
    """Three times of what it takes, for machines that are slow or busy."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3 * most


# Where the classes are imported from, and when; each in a process of its own that has loaded torch alone.
ORDERS = (
    "import leanqkv; from transformers import AutoModelForCausalLM",
    "from transformers import AutoModelForCausalLM; import leanqkv",
    "import transformers; import leanqkv; AutoModelForCausalLM = transformers.AutoModelForCausalLM",
    "from leanqkv import LeanForCausalLM; from transformers import AutoModelForCausalLM",
    "from leanqkv.model.plan import Plan; from transformers import AutoModelForCausalLM",
    "from leanqkv.checkpoints.open import open_checkpoint; from transformers import AutoModelForCausalLM",
    "import leanqkv, peft, accelerate, datasets; from transformers import AutoModelForCausalLM",
    "import leanqkv, importlib.util; importlib.util.find_spec('transformers'); "
    "from transformers.models.auto.modeling_auto import AutoModelForCausalLM",
)
LOAD = """
import os, sys, warnings
import torch
statement, directory = sys.argv[1:3]
assert "transformers" not in sys.modules
exec(statement)
model = AutoModelForCausalLM.from_pretrained(directory)
print(type(model).__module__, type(model).__name__)
from transformers import AutoConfig, AutoModel
print(type(AutoConfig.from_pretrained(directory)).__module__)
print(type(AutoModel.from_pretrained(directory)).__name__)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("startup")
    leanqkv.LeanForCausalLM(leanqkv.preset("tiny+hidden_size=32+intermediate_size=64")).save_pretrained(directory)
    for file in directory.glob("*.py"):
        file.unlink()
    return directory


@pytest.mark.long_cases
@pytest.mark.slow
@pytest.mark.parametrize("statement", ORDERS)
def test_checkpoints_load_without_trust_in_their_code(directory, statement):
    command = [sys.executable, "-c", LOAD, statement, str(directory)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["leanqkv.model.causal_lm", "LeanForCausalLM", "leanqkv.model.config", "LeanModel"]


def test_every_public_name_is_there():
    assert {*leanqkv.__all__} <= {*dir(leanqkv)}
    for name in leanqkv.__all__:
        assert getattr(leanqkv, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        leanqkv.nothing  # noqa: B018
