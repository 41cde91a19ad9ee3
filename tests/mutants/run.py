"""Runs the tests against mutants of the package, one at a time, and records which test catches each.

mutants.txt has a block of lines for each mutant: `room.name  file  tests`, the code that is replaced (`-`) and its
replacement (`+`). The tests are files, the most specific first. matrix.json has the results. A mutant with a result is
not run again, so the same command resumes an interrupted run.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MUTANTS, MATRIX = HERE / "mutants.txt", HERE / "matrix.json"
COPIED = ("src", "tests", "experiments", "benchmarks", "plugins", "docs", "results")
SECONDS = 600
IMPORTED = ("torch._dynamo", "transformers.generation.utils", "transformers.trainer", "scipy.stats", "typer.rich_utils")
SETTINGS = {"HF_HUB_OFFLINE": "1", "COLUMNS": "160", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
PYTEST = ("-q", "-p", "no:cacheprovider", "--tb=no")
CASES = {"test": "not exhaustive", "test-all": "exhaustive"}  # by the target that runs them


@dataclass(frozen=True)
class Mutant:
    """`original`, which `file` has exactly once, becomes `replacement`."""

    name: str
    file: str
    tests: tuple[str, ...]
    original: str
    replacement: str

    def apply(self, root: Path = ROOT) -> str:
        """Return the content of the mutated file.

        Raises:
            ValueError: the original is not found exactly once.
        """
        content = (root / self.file).read_text(encoding="utf-8")
        if (count := content.count(self.original)) != 1:
            raise ValueError(f"{self.name}: its original is found {count} times in {self.file}")
        return content.replace(self.original, self.replacement)


def read_mutants() -> list[Mutant]:
    """Return the mutants of mutants.txt, in its order."""
    return [_parse(block) for block in MUTANTS.read_text(encoding="utf-8").strip().split("\n\n")]


def _parse(block: str) -> Mutant:
    (name, file, *tests), *lines = block.split("\n")[0].split(), *block.split("\n")[1:]
    parts = ["\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+"]
    original, replacement = (part if "\n" in part else part.strip() for part in parts)
    files = tuple(_under("tests/", f"{test}.py") for test in tests)
    return Mutant(name, _under("src/leanqkv/", file), files, original, replacement)


def _under(folder: str, path: str) -> str:
    """Return the path of a file below a folder, or in `experiments`."""
    return path if path.startswith("experiments/") else folder + path


def read_matrix() -> dict[str, dict]:
    """Return the results so far, by the mutant's name."""
    return json.loads(MATRIX.read_text(encoding="utf-8")) if MATRIX.exists() else {}


def record(name: str, result: dict | None) -> None:
    """Add a result, or remove it; the file is read anew, since another run may have written to it."""
    matrix = read_matrix() | {name: result}
    kept = {name: entry for name, entry in sorted(matrix.items()) if entry is not None}
    partial = MATRIX.with_suffix(f".{os.getpid()}")
    partial.write_text("{\n" + ",\n".join(f" {json.dumps(n)}: {json.dumps(e)}" for n, e in kept.items()) + "\n}\n")
    partial.replace(MATRIX)


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the tree, in which files may be changed."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        root = Path(directory)
        for name in COPIED:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for file in ROOT.iterdir():
            if file.is_file():
                shutil.copyfile(file, root / file.name)
        yield root


def failures(root: Path, *arguments: str, seconds: float | None = SECONDS) -> list[str]:
    """Run pytest in `root`; return the tests that fail, or that there was no end."""
    with tempfile.TemporaryFile("w+") as output:
        process = multiprocessing.get_context("fork").Process(target=_pytest, args=(root, output.fileno(), arguments))
        process.start()
        try:
            process.join(seconds)
            if process.exitcode is None:
                return [f"no end within {seconds} s"]
        finally:
            if process.exitcode is None:
                os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]  # with what the tests have started
                process.join()
            shutil.rmtree(root / "cache", ignore_errors=True)
        output.seek(0)
        printed = output.read()
    found = re.findall(r"^(?:FAILED|ERROR) (\S+\.py(?:::.+?)?)(?: - |$)", printed, re.MULTILINE)
    if bool(found) != (process.exitcode not in (0, 5)):  # 5: no test is marked so
        raise RuntimeError(f"pytest ended with {process.exitcode}, failing tests {found}:\n{printed[-2000:]}")
    return found


def _pytest(root: Path, output: int, arguments: tuple[str, ...]) -> None:
    """Run pytest in `root` with its package, in a process that has imported what takes long, and exit."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(root)
    os.environ["PYTHONPATH"] = sys.path[0] = str(root / "src")
    import pytest

    sys.exit(pytest.main([*PYTEST, *arguments]))


def run(mutants: list[Mutant]) -> None:
    """Try each mutant that has no result, record what catches it, and print all results."""
    with copied() as root:
        # A mutant must not leave data where others read it.
        os.environ |= {**SETTINGS, "XDG_CACHE_HOME": str(root / "cache"), "HF_HOME": str(root / "cache" / "hf")}
        for name in IMPORTED:
            importlib.import_module(name)
        for mutant in mutants:
            if (result := read_matrix().get(mutant.name)) is None:
                started = time.perf_counter()
                (root / mutant.file).write_text(mutant.apply(), encoding="utf-8")
                tries = ((name, failures(root, "-x", "-m", cases, *mutant.tests)) for name, cases in CASES.items())
                target, found = next((each for each in tries if each[1]), (None, [None]))
                shutil.copyfile(ROOT / mutant.file, root / mutant.file)
                seconds = round(time.perf_counter() - started)
                result = {"caught_by": found[0], "make": target, "seconds": seconds}
                record(mutant.name, result)
            caught = f"{result['caught_by']} (make {result['make']})" if result["caught_by"] else "SURVIVED"
            print(f"{mutant.name:32} {caught:90} {result['seconds']:5} s", flush=True)
        confirm(root, mutants)


def confirm(root: Path, mutants: list[Mutant]) -> None:
    """Forget the results that rest on a test that fails without a mutant too."""
    matrix = read_matrix()
    caught_by = {mutant.name: matrix[mutant.name]["caught_by"] or "" for mutant in mutants}
    tests = sorted({test for test in caught_by.values() if "::" in test})
    failing = failures(root, *tests, seconds=None) if tests else []
    for name, test in caught_by.items():
        if test in failing:
            record(name, None)
            print(f"{name}: {test} fails without the mutant too; mend it first")


def main() -> None:
    """Run the chosen mutants that have no result yet; exit with 1 if any is stale or survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="those whose name matches this regular expression")
    parser.add_argument("--sample", type=int, help="so many of them, drawn at random, run again")
    parser.add_argument("--again", action="store_true", help="those with a result too")
    chosen = parser.parse_args()
    mutants = [mutant for mutant in read_mutants() if re.search(chosen.only, mutant.name)]
    if chosen.sample is not None:
        mutants = random.sample(mutants, min(chosen.sample, len(mutants)))
    if chosen.again or chosen.sample is not None:
        for mutant in mutants:
            record(mutant.name, None)
    stale = []
    for mutant in mutants:
        try:
            mutant.apply()
        except (ValueError, FileNotFoundError) as error:
            stale.append(mutant)
            print(f"stale: {error}")
    mutants = [mutant for mutant in mutants if mutant not in stale]
    run(mutants)
    results = read_matrix()
    survivors = [mutant.name for mutant in mutants if not results.get(mutant.name, {}).get("caught_by")]
    print(f"{len(mutants)} mutants: {len(survivors)} survived, {len(stale)} stale", *survivors, sep="\n  ")
    sys.exit(bool(stale or survivors))


if __name__ == "__main__":
    main()
