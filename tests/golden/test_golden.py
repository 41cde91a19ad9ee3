"""Every command on tiny models, its refusals and its help, and the import graph: what golden.json holds stays.

`make golden` writes the file anew; read its difference before you commit it.
"""

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus import SHAPE

from golden.graph import import_graph
from golden.normal import difference, files, named_once, settled, sha256, shown, without_decimals, written
from golden.scenario import COMMANDS, NAMES, REFUSALS, command_lines, prepare
from leanqkv import progress
from leanqkv.compare.comparison import slug
from leanqkv.compare.suites import SUITES
from leanqkv.environment import command_line, hardware, place_of, versions

FILE = Path(__file__).with_name("golden.json")
# For changes that are to keep everything; `make test-all` and `make golden` run them.
pytestmark = pytest.mark.exhaustive

# What a log has of long work, on a slow machine.
PROGRESS = re.compile(r"about \d+:\d\d left$|: step \d+ of \d+ ")


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory) -> Iterator[Path]:
    """The directory in which all commands run."""
    directory = tmp_path_factory.mktemp("golden")
    prepare(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANQKV_CACHE", str(directory / "cache"))
        patch.setenv("LEANQKV_DEBUG", "0")
        patch.delitem(SUITES, "vision", raising=False)  # other tests may have added it
        patch.setenv("COLUMNS", "1000")  # of the help, an option a line
        patch.setattr(progress.console, "width", 1000)
        patch.chdir(directory)
        yield directory


def assert_golden(section: str, found: Any) -> None:
    """Compare a section of the file with what is found, exactly where it was made and up to rounding elsewhere."""
    golden, found = json.loads(FILE.read_text()) if FILE.exists() else {}, without_places(found)
    if os.environ.get("WRITE_GOLDEN"):
        FILE.write_text(written(golden | {"made on": made_on(), section: found}) + "\n")
        return
    if golden["made on"] != made_on():
        found = settled(found, golden[section])
    lines = difference(found, golden[section])
    assert not lines, f"not as {FILE.name} has it; if that is meant, `make golden`:\n{lines}"


def made_on() -> list[str]:
    """Return what decides how sums round."""
    information = Path("/proc/cpuinfo")
    flags = re.findall("^flags.*", information.read_text() if information.exists() else "", re.MULTILINE)[:1]
    packages = (f"{name} {version}" for name, version in versions("torch", "numpy", "scipy").items())
    return [place_of(hardware("cpu")), f"flags {zlib.crc32(str(flags).encode()):08x}", *packages]


def without_places(found: Any) -> Any:
    """Return results without the names of this machine and this test's place, and without measured speeds."""
    names = {SHAPE: "…", slug(SHAPE): "…", f"{Path.cwd()}/": "", command_line(): "COMMAND"}
    names |= {place_of(hardware("cpu")): "MACHINE", hardware("cpu")["cpu"]: "CPU"}
    names |= {sha256(path): f"SHA-256 of {path}" for path in sorted(Path().rglob("*.safetensors"), reverse=True)}
    text = json.dumps(found)
    for name, instead in names.items():
        text = text.replace(json.dumps(name)[1:-1], instead)
    for file in Path().rglob("record.json"):  # throughput and minutes stand in columns of tables
        rate = f"{json.loads(file.read_text())['tokens_per_second']:,.0f}"
        text = re.sub(rf' {rate}( \| [\d.]+(?= \|))?(?="| \|)', " #", text)
    return json.loads(text)


def test_commands(place: Path, cli: Callable) -> None:
    results, before = {}, set(place.iterdir())
    for line, words in command_lines(COMMANDS).items():
        code, out, err = cli(*words)
        err = "\n".join(line for line in err.splitlines() if not PROGRESS.search(line))
        results[line] = {"exit": code, "out": shown(out), "err": shown(err)}
        new = sorted(set(place.iterdir()) - before)
        before |= set(new)
        results[line] |= {path.name: files(path) for path in new if path.name != "cache"}
        if words[0] == "bench":
            results[line] = without_decimals(results[line])
    assert_golden("commands", named_once(results) | {"cache": sorted(files(place / "cache"))})
    if os.environ.get("WRITE_GOLDEN") or json.loads(FILE.read_text())["made on"] == made_on():
        assert_golden("weights", {str(path): sha256(path)[:32] for path in sorted(Path().rglob("*.safetensors"))})


def test_refusals(place: Path, cli: Callable) -> None:
    before, results = sorted(place.rglob("*")), {}
    for line, words in command_lines(REFUSALS).items():
        code, _, err = cli(*words)
        results[line] = f"{code}: {' / '.join(shown(err))}"
    assert [path for path in sorted(place.rglob("*")) if path not in before and "cache" not in path.parts] == []
    assert_golden("refusals", results)


def test_help(cli: Callable) -> None:
    assert_golden("help", {name: shown(cli(*name.split(), "--help")[1]) for name in ("", *NAMES)})


def test_imports() -> None:
    assert_golden("imports", import_graph())
