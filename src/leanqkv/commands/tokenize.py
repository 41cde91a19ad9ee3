"""`leanqkv tokenize`."""

from typing import Annotated

import typer

from ..errors import LeanError
from ..progress import console
from .options import NAME_HELP, DataOptions, prepare


def tokenize(
    names: Annotated[list[str], typer.Argument(help=NAME_HELP + " Several share one tokenizer.")], data: DataOptions
) -> None:
    """Tokenize a text before training, for example on a machine without an accelerator.

    `leanqkv train` and `compare` find the token files of the same models and data in the cache, or make them. Rerun the
    command to resume after the last 64 Mi tokens.

    leanqkv tokenize small --data corpus/ --workers 16

    leanqkv tokenize gpt2-355m --data fineweb-edu:sample-10BT --tokenizer gpt2 --workers 32
    """
    from ..presets import preset

    configs = [preset(name) for name in names]
    for name, config in zip(names, configs, strict=True):
        if config.task == "image_classification":
            raise LeanError(f"{name} is a model of images, and only text has tokens")
    prepared = prepare(data, configs)
    console.print(f"files: {prepared.directory}", soft_wrap=True)
