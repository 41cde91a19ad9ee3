"""Settings for every test; set before transformers is imported."""

import functools
import os
import signal
import sys
import tempfile
import warnings
from collections import Counter
from datetime import date
from importlib import import_module
from zlib import crc32

# Checkpoints carry their code, and loading it copies it under HF_HOME: a fresh folder, never the person's own.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="leanqkv-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["COLUMNS"] = "160"  # tables are as wide wherever the tests run

import pytest
import torch

torch.set_num_threads(1)
# Started with `&`, this process ignores Ctrl-C, and so would those that tests start and stop with it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# `make test-fast` runs every tenth case of a test, beginning with the first: of 89 architectures, 9.
CASES_PER_FAST_ONE = 10
# `make test` runs every case of a test that has up to MANY or is marked as cheap, and every tenth of the others and of
# those marked as long, other ones each week, so that all are reached; SAMPLE=8 make test runs those of week 8 again. It
# runs a third of the tests of experiments and benchmarks.
MANY = 10
CASES_PER_TESTED_ONE = 10
SAMPLE = int(os.environ.get("SAMPLE", date.today().isocalendar().week))


def pytest_report_header():
    return f"cases: one in {CASES_PER_TESTED_ONE} of many, SAMPLE={SAMPLE}"


def pytest_collection_modifyitems(items):
    """Mark all but a sample of the cases of every test as slow, and of many all but a larger one as exhaustive."""
    tests = [item.nodeid.partition("[")[0] for item in items]
    numbers, totals = Counter(), Counter(tests)
    for item, test in zip(items, tests, strict=True):
        if numbers[test] % CASES_PER_FAST_ONE:
            item.add_marker(pytest.mark.slow)
        many = totals[test] > MANY or item.get_closest_marker("long_cases")
        of = min(CASES_PER_TESTED_ONE, totals[test])
        beside = "experiments/" in item.nodeid or "benchmarks" in item.nodeid  # and not of the package
        left_out = many and numbers[test] % of != SAMPLE % of
        left_out = left_out or (beside and crc32(item.nodeid.encode()) % 3 != SAMPLE % 3)
        if left_out and not item.get_closest_marker("cheap_cases"):
            item.add_marker(pytest.mark.exhaustive)
        numbers[test] += 1


@functools.cache
def compiler_works() -> bool:
    """Whether C++ of one line can be compiled: the kernel for decoding is not asked, its own errors are to be seen."""
    from leanqkv.compat import compile_cpp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return compile_cpp('extern "C" int one() { return 1; }') is not None


@pytest.fixture
def needs_compiler():
    """Skips the test where nothing can be compiled."""
    if not compiler_works():
        pytest.skip("no working C++ compiler, with which the kernel for decoding is compiled")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The small corpus of corpus.py, tokenized."""
    from corpus import prepare

    directory = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANQKV_CACHE", str(directory / "cache"))
        yield prepare(directory)


@pytest.fixture
def cli(capsys, monkeypatch):
    """Runs a command line in this process; returns exit code, standard output and standard error.

    Its first word is a command of leanqkv, or a module of experiments, which `python -m` runs.
    """

    def run(*arguments: str) -> tuple[int, str, str]:
        module = arguments[0] if arguments and arguments[0].startswith("experiments.") else ""
        main = import_module(f"{module}.__main__" if module else "leanqkv.cli").main
        words = [module.rpartition(".")[2], *arguments[1:]] if module else ["leanqkv", *arguments]
        monkeypatch.setattr(sys, "argv", words)
        capsys.readouterr()
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
            if module:
                patch.setattr(sys, "orig_argv", ["python", "-m", *arguments])
            main()
        return end.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def unwrapped(cli):
    """The same, with both outputs as one line: tables and long lines are broken where the terminal ends."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code, out, err = cli(*arguments)
        return code, " ".join(out.split()), " ".join(err.split())

    return run
