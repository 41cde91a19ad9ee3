"""Commands that are killed before their k-th file operation: started again they end as if nothing had happened."""

import gc
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from corpus import SHAPE, write_corpus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="a killed process is a forked one that ends at once"),
]

MODEL = f"tiny{SHAPE}"
DATA = ("--data", "../corpus.txt", "--device", "cpu", "--precision", "fp32", "--micro-batch-size", "4")
STEPS = (*DATA, "--steps", "4", "--batch-size", "4", "--evaluate-every", "2", "--evaluation-sequences", "4")
COMMANDS = {
    "train": ("train", MODEL, *STEPS, "--out", "out"),
    "train, checkpoints kept": ("train", MODEL, *STEPS, "--keep-checkpoints", "--out", "out"),
    "uptrain": ("uptrain", "../source", "--teacher", "../source", *STEPS, "--out", "out"),
    "compare": ("compare", MODEL, f"{MODEL}+skipv1", *STEPS, "--seeds", "1", "--jobs", "1", "--out", "out"),
    "convert": (
        *("convert", "../source", "--to", "skipv1", "--method", "mean-v", "--out", "deep/out"),
        *("--evaluate", "../corpus.txt", "--evaluate-tokens", "64"),
    ),
    "eliminate": ("eliminate", "../source", "--remove", "block-diagonal", "--out", "out"),
    "import": ("import", "../source", "--out", "out"),
    "frontier": (
        *("frontier", "../source", "--calibration", "../corpus.txt", "--evaluate", "../corpus.txt", "--tokens", "256"),
        *("--sequence-length", "32", "--evaluate-tokens", "64", "--contexts", "0", "--budgets", "84%"),
        *("--kinds", "latents,gqa", "--calibrations", "2", "--out", "out"),
    ),
}
# Each command is killed at so many of its operations, evenly spread from the first to the last; most have over 100.
# With LEANQKV_KILL_EVERYWHERE=1 it is killed at every one, which takes some minutes.
MOST = {
    "train": 10,
    "train, checkpoints kept": 6,
    "uptrain": 5,
    "compare": 5,
    "convert": 12,
    "eliminate": 6,
    "import": 6,
    "frontier": 4,
}
# What depends on the clock.
TIMES = ("seconds", "tokens_per_second", "time")
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def run_in_child(arguments: tuple[str, ...], place: Path, kill_at: int | None) -> int:
    """Run a command line in a forked process, which ends right before file operation `kill_at`; return their number.

    Nothing of Python is run at the end: no `finally`, no buffers, no `atexit`.
    """
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            _run_until(arguments, place, kill_at, lambda done: os.write(writer, str(done).encode()))
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as counted:
        count = counted.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (0 if kill_at is None else 9)
    return int(count or 0)


def _run_until(arguments: tuple[str, ...], place: Path, kill_at: int | None, finished: Callable[[int], object]) -> None:
    from leanqkv.cli import main

    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    done = 0

    def count(event: str, details: tuple) -> None:
        nonlocal done
        path = details[0] if details else None
        if event == "open":
            counts = isinstance(path, str | bytes) and bool((details[2] or 0) & WRITING)
        else:
            counts = event in CHANGES and isinstance(path, str | bytes)  # older locks change the mode of an open file
        # Names relative to an open directory come from the removal of a whole directory.
        if counts and (not (file := Path(os.fsdecode(path))).is_absolute() or file.is_relative_to(place)):
            done += 1
            if done == kill_at:
                os._exit(9)

    sys.addaudithook(count)
    sys.argv = ["leanqkv", *arguments]
    try:
        main()
    except SystemExit as end:
        finished(done)
        os._exit(end.code or 0)


def without_times(content):
    if isinstance(content, dict):
        return {key: without_times(value) for key, value in content.items() if key not in TIMES}
    return [without_times(value) for value in content] if isinstance(content, list) else content


def state(place: Path) -> dict[str, tuple]:
    """Every file in `place`, hidden ones too: its mode, and its content without what depends on the clock."""
    files = {}
    for path in sorted(place.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        content = None
        if path.suffix == ".json":
            content = without_times(json.loads(path.read_text()))
        elif path.name == "complete":  # hashes, of times too
            content = sorted(json.loads(path.read_text())["sha256"])
        elif path.is_file() and path.suffix not in (".html", ".md"):  # reports show the speed
            content = path.read_bytes()
        files[str(path.relative_to(place))] = mode, content
    return files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus, its tokens in a cache, and a trained model."""
    directory = tmp_path_factory.mktemp("kills")
    write_corpus(directory / "corpus.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANQKV_CACHE", str(directory / "cache"))
        patch.setenv("TOKENIZERS_PARALLELISM", "false")  # a forked process cannot use its parent's threads
        yield directory


@pytest.fixture(scope="module")
def source(folder):
    (folder / "first").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "first")
        run_in_child(("train", MODEL, *STEPS, "--out", "../source"), folder, None)
    return folder / "source"


def fresh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.rmtree(folder / "work", ignore_errors=True)
    (folder / "work").mkdir()
    monkeypatch.chdir(folder / "work")
    return folder / "work"


@pytest.mark.long_cases
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_killed_at_any_file_operation(folder, source, cli, command, monkeypatch):
    arguments, before = COMMANDS[command], state(source)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # the trainer's take half of the time
    # A forked process cannot use the threads that OpenMP has started in this one.
    monkeypatch.setattr("leanqkv.compare.comparison.available_cores", lambda: 1)
    fresh(folder, monkeypatch)
    assert cli(*arguments)[0] == 0  # imports what the children would import one by one
    place = fresh(folder, monkeypatch)
    operations = run_in_child(arguments, place, None)
    expected = state(place)
    assert operations > 10
    files = {path: mode for path, (mode, content) in expected.items() if content is not None}
    assert len(set(files.values())) == 1, "files of different modes"
    assert not [path for path in expected if path.rpartition("/")[2].startswith(".") or "partial" in path]
    number = operations if os.environ.get("LEANQKV_KILL_EVERYWHERE") else min(operations, MOST[command])
    for kill_at in sorted({1 + k * (operations - 1) // (number - 1) for k in range(number)}):
        place = fresh(folder, monkeypatch)
        run_in_child(arguments, place, kill_at)
        complete = state(place) == expected
        code, _, err = cli(*arguments)
        # What was complete is not written over; a run says that it is finished.
        assert code == 0 or (complete and "is not empty" in err), (
            f"killed at operation {kill_at} of {operations}: {err}"
        )
        after = state(place)
        assert after.keys() == expected.keys(), f"killed at operation {kill_at} of {operations}"
        different = [path for path in after if after[path] != expected[path]]
        assert not different, f"killed at operation {kill_at} of {operations}"
    assert state(source) == before


def test_the_token_cache_killed_at_any_file_operation(folder, source, cli, monkeypatch):
    arguments = ("train", MODEL, *STEPS, "--steps", "1", "--out", "out")

    def empty_cache() -> Path:
        place = fresh(folder, monkeypatch)
        monkeypatch.setenv("LEANQKV_CACHE", str(place / "cache"))
        return place

    place = empty_cache()
    cli(*arguments)
    expected = state(place / "cache")
    for kill_at in (1, 2, 4, 6, 8, 10, 11):
        place = empty_cache()
        run_in_child(arguments, place, kill_at)
        assert cli(*arguments)[0] == 0
        assert state(place / "cache") == expected, f"killed at operation {kill_at}"


@pytest.mark.parametrize("command", ["convert", "eliminate", "import"])
def test_a_source_replaced_between_two_starts(folder, source, cli, command, monkeypatch):
    """The path is the same, and so are the names, the sizes and the times of its files: the weights are not."""
    arguments = tuple("source" if part == "../source" else part for part in COMMANDS[command])
    kill_at = None
    for _ in range(2):  # first to learn the number of operations
        place = fresh(folder, monkeypatch)
        shutil.copytree(source, "source")
        operations = run_in_child(arguments, place, kill_at)
        kill_at = operations - 3
    assert list(place.rglob(".out.partial/*.safetensors")), "no shard was finished"
    _change_weights(Path("source/model.safetensors"))
    assert cli(*arguments)[0] == 0
    (out,) = (path for path in place.rglob("out"))
    resumed = (out / "model.safetensors").read_bytes()
    shutil.rmtree(out)
    assert cli(*arguments)[0] == 0
    assert (out / "model.safetensors").read_bytes() == resumed


def _change_weights(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    times = file.stat()
    save_file({name: tensor * 2 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_size == times.st_size
