"""`pip install .` alone: what works without any extra, and the one line that names the extra of a missing package."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from corpus import write_corpus
from shapes import randomize, tiny

from leanqkv import LeanForCausalLM
from leanqkv.data.tokenizer import train_tokenizer

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
MODULES = {"scikit-learn": "sklearn", "pillow": "PIL", "lm-eval": "lm_eval"}
# The modules that only extras install, and some that only these bring along.
HIDDEN = {
    *("pandas", "peft", "starlette"),
    *(
        MODULES.get(name := requirement.partition(">")[0], name)
        for extra, requirements in PROJECT["optional-dependencies"].items()
        for requirement in requirements
        if extra != "dev" and "leanqkv" not in requirement
    ),
}
# Runs command lines in one process that finds none of these modules, nor their versions.
BARE = """
import importlib.metadata, json, sys
from importlib.machinery import PathFinder
hidden, lines = map(json.loads, sys.argv[1:])

class Bare:
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)

    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()):
        return () if context.name in hidden else importlib.metadata.MetadataPathFinder.find_distributions(context)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare()
from leanqkv.cli import main
for line in lines:
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as end:
        print(f"exit code {end.code or 0}", file=sys.stderr, flush=True)
"""
WORKING = (
    "presets",
    "plan-run tiny",
    "inspect model",
    "verify model model --text short.txt",
    "eliminate model --remove query --layer 1 --out less",
    "generate less --prompt the --max-new-tokens 4",
    "import model --out imported",
    "convert model --to gqa --ratio 0.5 --out grouped",
    "convert model --to latents --calibration corpus.txt --tokens 512 --sequence-length 32 --out latents",
    "eval latents --data short.txt",
    "eval latents --data short.txt --against model",
)
REFUSED = {
    "train tiny --data corpus.txt --steps 1 --out run": "train",
    "uptrain model --data corpus.txt --steps 1 --out run": "train",
    "compare tiny tiny+skipv1 --data corpus.txt --out compared": "train",
    "eval model --data some/dataset": "train",
    "compare tiny tiny+skipv1 --data corpus.txt --launcher submitit --out compared": "cluster",
    "eval model --tasks hellaswag": "eval",
    "serve model": "serve",
    "import model.gguf --out other": "gguf",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with a model without norms, its tokenizer, and a text."""
    directory = tmp_path_factory.mktemp("bare")
    text = write_corpus(directory / "corpus.txt").read_text()
    (directory / "short.txt").write_text(text[:2000])
    model = LeanForCausalLM(tiny("gpt", vocab_size=300, norm_type="none"))
    randomize(model, std=0.2).save_pretrained(directory / "model")
    train_tokenizer(iter([text]), 300).save_pretrained(directory / "model")
    (directory / "model.gguf").touch()
    return directory


def run(place: Path, lines) -> list[tuple[str, str]]:
    """Of each of these command lines, run in one process, its standard error and its exit code."""
    command = [sys.executable, "-c", BARE, json.dumps(sorted(HIDDEN)), json.dumps([*lines])]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    outcomes = re.findall(r"(.*?)exit code (\d+)\n", done.stderr, re.DOTALL)
    assert len(outcomes) == len(lines), done.stderr
    return outcomes


@pytest.mark.slow
def test_a_bare_installation_converts_eliminates_generates_and_evaluates(place):
    for line, (said, code) in zip(WORKING, run(place, WORKING), strict=True):
        assert code == "0", (line, said)


@pytest.mark.slow
def test_a_missing_package_is_named_with_its_extra(place):
    for (line, extra), (said, code) in zip(REFUSED.items(), run(place, REFUSED), strict=True):
        assert code == "2", (line, said)
        assert said.startswith("error: ") and said.count("\n") == 1 and f"'leanqkv[{extra}]'" in said, (line, said)


def test_every_extra_is_part_of_all():
    extras = PROJECT["optional-dependencies"]
    assert extras["all"] == [f"leanqkv[{','.join(sorted(extras.keys() - {'all', 'dev'}))}]"]
    assert "leanqkv[all]" in extras["dev"]
