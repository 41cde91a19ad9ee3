"""The model card of a training run."""

from pathlib import Path
from typing import Any

from ..checkpoints.card import card, origin
from ..model.config import LeanConfig
from ..records import loss_name


def model_card(name: str, record: dict[str, Any], initial: Path | None, tokenizer: bool) -> str:
    """Return the card of a finished run, in Markdown.

    Args:
        name: of its directory.
        record: the content of record.json.
        initial: the checkpoint that the run started from; None: new weights.
        tokenizer: there is one beside the model.
    """
    made_from = {} if initial is None else origin(initial)
    recipe, task = record["recipe"], LeanConfig(**record["config"]).task
    rate = f"{recipe['learning_rate']:g}"
    unit = "images" if task == "image_classification" else f"sequences of {record['context_length']:,} tokens"
    optimizer = {"adamw": "AdamW", "muon": "Muon and AdamW"}[recipe.get("optimizer", "adamw")]
    start = "from new weights" if initial is None else f"from the weights of {made_from['base_model']}"
    trained = (
        f"`{record['name']}`, trained with leanqkv {start}: {recipe['steps']:,} steps of {recipe['batch_size']:,} "
        f"{unit} of {record['data']['description']}, {optimizer} with a peak learning rate of {rate}."
    )
    if "norms" in record:
        trained += " Its norms were removed on the way: this is a model without norms."
    rows = {
        "parameters": f"{record['parameters']['total']:,}",
        "KV cache, bytes per token in bfloat16": f"{record['kv_bytes_per_token']['bfloat16']:,}",
        f"{loss_name(record['final'])}, nats": f"{record['final']['validation_loss']:.4f}",
    }
    if task == "masked_lm":
        del rows["KV cache, bytes per token in bfloat16"]  # an encoder has none
    if "accuracy" in record["final"]:
        rows["test accuracy"] = f"{record['final']['accuracy']:.4f}"
    table = "| | |\n|---|--:|\n" + "".join(f"| {what} | {value} |\n" for what, value in rows.items())
    return card(
        name,
        task,
        [] if task == "masked_lm" else ["kv-cache"],
        made_from,
        False,
        trained,
        f"## Result\n\n{table}\nThe whole record is in record.json.",
        tokenizer=tokenizer,
    )
