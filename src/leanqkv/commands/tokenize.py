"""`leanqkv tokenize`."""

from typing import Annotated

import typer

from ..errors import LeanError
from ..progress import console
from .options import NAME_HELP, DataOptions, option_groups, prepare


@option_groups
def tokenize(
    names: Annotated[list[str], typer.Argument(help=NAME_HELP + " Several share one tokenizer.")], data: DataOptions
) -> None:
    """Make the token files of a text before a model is trained on it, as on a machine without an accelerator.

    `leanqkv train` and `compare` with the same models and data find them in the cache, and make them themselves where
    they are missing. Stopped and started again, the same command goes on behind the last 64 Mi tokens.

    leanqkv tokenize small --data corpus/ --workers 16

    leanqkv tokenize gpt2-355m --data fineweb-edu:sample-10BT --tokenizer gpt2 --workers 32
    """
    from .. import presets
    from ..train.tasks import task_of

    configs = [presets.preset(name) for name in names]
    for name, config in zip(names, configs, strict=True):
        if config.task == "image_classification":
            raise LeanError(f"{name} is a model of images, and only text has tokens")
        task_of(config, name)
    prepared = prepare(data, configs)
    console.print(f"files: {prepared.directory}", highlight=False, soft_wrap=True)
