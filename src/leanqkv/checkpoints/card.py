"""Model cards: README.md of a finished directory, as the Hugging Face Hub shows it."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from .gguf_format import GgufFile, is_gguf

CARD = "README.md"
# Of a task the Hub's name and the class that loads a model of it.
TASKS = {
    "causal_lm": ("text-generation", "AutoModelForCausalLM"),
    "masked_lm": ("fill-mask", "AutoModelForMaskedLM"),
    "image_classification": ("image-classification", "AutoModelForImageClassification"),
}
# What the head of a card says of a licence.
LICENSE = ("license", "license_name", "license_link")
OWN_CODE = """The code of the model is in this repository, so `transformers` asks to trust it:

{code}

With `leanqkv` installed, `import leanqkv` takes the place of `trust_remote_code`."""
NO_LICENSE = "No licence is known for these weights: add `license:` to the first lines before they are published."


def origin(source: Path) -> dict[str, str]:
    """Return `base_model` and, if it is known, those of LICENSE of what is made from a checkpoint.

    The name is that of the Hub, whose cache the files are in, or what the checkpoint's own card or GGUF metadata says;
    else that of the directory.
    """
    source = source.resolve()
    said: Mapping[str, Any] = {}
    name = source.name
    if is_gguf(source):
        about, name = GgufFile.open(source).metadata, source.stem
        repository = str(about.get("general.base_model.0.repo_url", "")).partition("https://huggingface.co/")[2]
        licence = {field: about.get(f"general.{field.replace('_', '.')}") for field in LICENSE}
        said = {"base_model": repository, **licence}
    elif (source / CARD).is_file():
        said = _front_matter(source / CARD)
    if in_cache := [folder.name for folder in source.parents if folder.name.startswith("models--")]:
        name = in_cache[0].removeprefix("models--").replace("--", "/")
    elif isinstance(said.get("base_model"), str) and (is_gguf(source) or "leanqkv" in (said.get("tags") or ())):
        name = said["base_model"] or name  # of ours, which has no repository; another's is a model of its own
    return {"base_model": name} | {field: said[field] for field in LICENSE if isinstance(said.get(field), str)}


def _front_matter(card: Path) -> Mapping[str, Any]:
    """Return the metadata at the head of a card; a card is free text, which may have none."""
    match = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8-sig", errors="replace"), re.DOTALL)
    with suppress(yaml.YAMLError, ValueError, RecursionError):  # an impossible date, brackets without end
        if match and isinstance(found := yaml.safe_load(match[1]), dict):
            return found
    return {}


def card(
    name: str,
    task: str,
    tags: Sequence[str],
    made_from: Mapping[str, str],
    stock: bool,
    *parts: str,
    tokenizer: bool = True,
) -> str:
    """Return a model card in Markdown.

    Args:
        name: of the model, and of the repository or directory that it is loaded from.
        tags: beside "leanqkv".
        made_from: what `origin` returns; nothing of a model with new weights.
        stock: it is of a class of transformers, and needs no code of ours.
        parts: paragraphs, of which the first stands before the section on loading.
        tokenizer: there is one beside the model; none is looked for beside one of images.
    """
    front = {**made_from, "library_name": "transformers", "pipeline_tag": TASKS[task][0], "tags": ["leanqkv", *tags]}
    first, *rest = parts
    paragraphs = [f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {name}", first]
    paragraphs += [f"## Load\n\n{loading(name, task, stock, tokenizer)}", *rest]
    if "license" not in made_from:
        paragraphs.append(NO_LICENSE)
    return "\n\n".join(paragraph.strip() for paragraph in paragraphs) + "\n"


def loading(name: str, task: str, stock: bool, tokenizer: bool = True) -> str:
    """Return how a model is loaded: code, and why it is trusted."""
    loader, text = TASKS[task][1], tokenizer and task != "image_classification"
    code = [f"from transformers import {loader}" + ", AutoTokenizer" * text, ""]
    code.append(f'model = {loader}.from_pretrained("{name}"{"" if stock else ", trust_remote_code=True"})')
    code += [f'tokenizer = AutoTokenizer.from_pretrained("{name}")'] * text
    block = "```python\n" + "\n".join(code) + "\n```"
    return block if stock else OWN_CODE.format(code=block)
