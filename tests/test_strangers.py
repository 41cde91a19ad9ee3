"""What a stranger sends runs no code of its own, writes over nothing, and is read as it is or refused."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from corpus import write_corpus
from safetensors.torch import load_file
from shapes import randomize, tiny

from leanqkv import LeanForCausalLM
from leanqkv.data import cache
from leanqkv.data.corpus import open_corpus
from leanqkv.data.tokenizer import train_tokenizer
from leanqkv.files import NODE, write_text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with a model and a text, in which commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEANQKV_CACHE", str(tmp_path / "cache"))
    randomize(LeanForCausalLM(tiny("gpt", vocab_size=300)), std=0.2).save_pretrained("model")
    train_tokenizer(iter(["def function(argument): return argument\n"] * 50), 300).save_pretrained("model")
    write_corpus(tmp_path / "text.txt")
    return tmp_path


def files() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}


def refused(cli, command: str) -> str:
    """The line with which a command refuses; it has changed nothing."""
    before = files()
    code, out, err = cli(*command.split())
    assert (code, len(err.splitlines())) == (2, 1), (code, out, err)
    assert files() == before
    return err


@pytest.mark.parametrize("out", ["model/config.json", "text.txt", "model", "link", "no/where.json"])
def test_eval_writes_over_no_file(folder, cli, out):
    Path("link").symlink_to("nowhere")
    message = refused(cli, f"eval model --data text.txt --out {out}")
    assert "nothing is ever written over" in message or "cannot be written" in message


@pytest.mark.parametrize(
    "command",
    [
        "train tiny --data {} --out texts/run",
        "uptrain model --steps 1 --data {} --out texts/run",
        "compare tiny --data {} --out texts/run",
        "convert model --calibration {} --out texts/run",
        "convert model --to gqa --evaluate {} --out texts/run",
        "frontier model --calibration {} --evaluate text.txt --out texts/run",
        "eval model --data {} --out texts/run",
        "experiments.analysis model --data {} --out texts/run",
    ],
)
@pytest.mark.parametrize("text", ["texts", "texts:0.5,text.txt", "text.txt,texts"])
def test_results_are_not_written_among_the_texts(folder, cli, command, text):
    Path("texts").mkdir()
    shutil.copy("text.txt", "texts")
    assert "lies in texts" in refused(cli, command.format(text))


def test_code_of_a_tokenizer_is_not_run(folder, cli, monkeypatch):
    """Not even where somebody answers transformers' question with yes."""
    file = Path("model/tokenizer_config.json")
    own = {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    Path("model/own.py").write_text("raise SystemExit('the code of a checkpoint was run')")
    Path("plain").mkdir()
    for file in Path("model").iterdir():
        if file.is_file() and file.name != "tokenizer.json":
            shutil.copy(file, "plain")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for model in ("model", "plain"):
        for command in (
            f"generate {model} --prompt a --max-new-tokens 2",
            f"eval {model} --data text.txt",
            f"convert {model} --to gqa --calibration text.txt --out o-c-{model}",
            f"eliminate {model} --remove block-diagonal --out o-{model}",
            f"train tiny --tokenizer {model} --data text.txt --out o-t --steps 1 --batch-size 1 --context-length 8",
            f"import {model} --out o-i-{model}",
            f"export {model} --out o-e-{model}",
        ):
            found, _, err = cli(*command.split())
            assert found in (0, 2) and "code of a checkpoint" not in err, command


def test_text_files_set_back_in_time_are_read_again(folder, monkeypatch):
    monkeypatch.setattr(cache, "REMEMBERED_BYTES", 0)
    file = folder / "text.txt"
    before = open_corpus(str(file)).fingerprint
    about, content = file.stat(), file.read_bytes()
    file.write_bytes(content[::-1])
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert open_corpus(str(file)).fingerprint != before


def test_storages_shorter_than_their_tensors_are_refused(folder, cli):
    weights = load_file("model/model.safetensors")
    Path("model/model.safetensors").unlink()
    torch.save(weights, "model/pytorch_model.bin")
    assert cli("generate", "model", "--prompt", "a", "--max-new-tokens", "2")[0] == 0
    with ZipFile("model/pytorch_model.bin") as archive:
        records = {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}
    shortened = next(name for name, data in records.items() if name.startswith("data/") and len(data) > 256)
    writer = torch._C.PyTorchFileWriter("model/pytorch_model.bin")
    for name, data in records.items():
        if name != "version" and not name.startswith(".data"):
            data = data[: len(data) // 2] if name == shortened else data
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    assert "damaged" in refused(cli, "generate model --prompt a")


def test_markdown_brings_no_html(tmp_path):
    write_text(tmp_path / "a.md", "# <img src=x>\n\n| a<br>b | <b>\n\n```\nx < y <s>\n```\n\n```<i>\n")
    assert (
        tmp_path / "a.md"
    ).read_text() == "# &lt;img src=x>\n\n| a<br>b | &lt;b>\n\n```\nx < y <s>\n```\n\n```&lt;i>\n"


def test_brackets_in_names_are_no_styles(folder, cli, monkeypatch):
    monkeypatch.setattr("leanqkv.report.page.find_spec", lambda name: None)
    code, out, _ = cli("convert", "model", "--to", "gqa", "--out", "o[bold]")
    assert code == 0 and "o[bold]: " in out and "pip install 'leanqkv[report]'" in " ".join(out.split())


@pytest.mark.parametrize("command", ["generate model --chat --prompt a", "serve model --port 0"])
def test_a_chat_template_without_end_is_refused(folder, cli, monkeypatch, command):
    monkeypatch.setattr("leanqkv.inference.text.TEMPLATE_SECONDS", 0.2)
    loop = "{% for i in range(100000) %}"
    Path("model/chat_template.jinja").write_text(loop * 3 + "{% endfor %}" * 3)
    assert "takes more than 0.2 seconds" in refused(cli, command)


def test_dtypes_that_are_none_are_refused(folder, cli):
    assert "dtype 'evil' is not known" in refused(cli, "train tiny+dtype=evil --data text.txt --steps 1 --out o")
    assert "dtype 'evil' is not known" in refused(cli, "inspect tiny+dtype=evil")


def test_a_directory_that_was_just_claimed_is_gone_on_with(folder, cli):
    """A frontier that was killed as soon as it had made its first files."""
    command = "frontier model --kinds latents --budgets 75% --calibrations 1 --tokens 640 --sequence-length 32"
    command += " --calibration text.txt --evaluate text.txt --evaluate-tokens 64 --contexts 16 --out o"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leanqkv.frontier.measure.make_directory", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        assert cli(*command.split())[0] == 130
    assert Path("o/job.json").exists() and not Path("o/points").exists()
    for name in (".lock", f".job.json.{NODE}-99999999.partial"):
        Path("o", name).touch()
    code, _, err = cli(*command.split())
    assert code == 0, err


def test_what_an_interrupted_conversion_left_goes_with_the_next_command(folder, cli):
    Path(".o.calibration").mkdir()
    assert cli(*["convert", "model", "--to", "gqa", "--out", "o"])[0] == 0
    assert not Path(".o.calibration").exists()


@pytest.mark.long_cases
@pytest.mark.parametrize(
    "command",
    [
        "bench model --context 8 --batch 1 --new-tokens 2 --rounds 1 --out o",
        "experiments.analysis model --data text.txt --probe-steps 0 --samples 2 --out o",
        "eval model --data text.txt --out o",
    ],
)
def test_a_full_disk_leaves_nothing_in_the_way_of_the_same_command(folder, cli, command):
    def full(file, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leanqkv.report.page.write_text", full)
        patch.setattr("leanqkv.commands.scoring.write_json", full)
        assert "the disk is full" in cli(*command.split())[2]
    assert not [file for file in Path().iterdir() if "o" in file.name.split(".")]
    assert cli(*command.split())[0] == 0


def test_names_are_text_on_every_page(folder, cli):
    """In figures, tables and model cards; dollars and backslashes are no formulas and no references."""
    name = 'm"<b onclick=x>\\1$y_{$'
    Path("model").rename(name)
    analysis = ("experiments.analysis", name, "--data", "text.txt", "--probe-steps", "0", "--samples", "2")
    assert cli(*analysis, "--out", "o1")[0] == 0
    assert (
        cli("convert", name, "--to", "gqa", "--evaluate", "text.txt", "--evaluate-tokens", "64", "--out", "o2")[0] == 0
    )
    assert cli("eliminate", name, "--remove", "block-diagonal", "--out", "o3")[0] == 0
    bench = ("bench", name, "--context", "8", "--batch", "1", "--new-tokens", "2", "--rounds", "1", "--out", "o4")
    assert cli(*bench)[0] == 0
    pages = [
        page for out in ("o1", "o2", "o3", "o4") for page in Path(out).rglob("*") if page.suffix in (".md", ".html")
    ]
    assert len(pages) >= 7
    for page in pages:
        text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text()) if page.suffix == ".md" else page.read_text()
        assert "<b " not in text, page
