"""The tables of `leanqkv presets`: sizes and mechanisms."""

from dataclasses import fields

import torch
from rich.table import Table

from ..model.plan import LAYER_SLOTS, MODEL_SLOTS
from ..model.shapes import count_parameters
from ..presets import preset
from ..presets.catalog import BASES, MECHANISMS, MechanismPreset
from ..progress import console


def list_presets() -> None:
    """Print a table of base sizes and one of mechanisms."""
    table = Table(title="Bases", title_justify="left")
    for column in ("name", "parameters", "KV B/token (bf16)", "source"):
        table.add_column(column, justify="right" if column[0] in "pK" else "left")
    for name, base in BASES.items():
        config = preset(name)
        parameters = f"{count_parameters(config).total / 1e6:,.1f} M"
        table.add_row(name, parameters, f"{config.plan.kv_bytes_per_token(torch.bfloat16):,}", base.source)
    console.print(table)
    for source, note in {base.source: base.note for base in BASES.values() if base.note}.items():
        console.print(f"{source}: {note}")
    console.print()
    table = Table(title="Mechanisms", title_justify="left")
    for column in ("name", "what it does", "options", "source"):
        table.add_column(column, overflow="fold")
    for name, mechanism in MECHANISMS.items():
        table.add_row(name, mechanism.summary, _options(mechanism), mechanism.source)
    console.print(table)
    console.print("A model is BASE+MECHANISM+…, with options as in tiny+skipv1:ratio=0.25+identity-query:layers=0,3;")
    console.print("any configuration field as in tiny+intermediate_size=576.")


def _options(mechanism: MechanismPreset) -> str:
    """Every option that the mechanism's name can have, with its default."""
    tables = (LAYER_SLOTS | MODEL_SLOTS).get(mechanism.slot)
    if tables is None:
        return ", ".join(f"{name}={'by width' if value is None else value}" for name, value in mechanism.spec.items())
    cls = tables[mechanism.spec.get("type", "average")]
    named = [f for f in fields(cls) if not isinstance(f.default, tuple)]  # a name cannot hold rows
    options = [f"{f.name}={mechanism.spec.get(f.name, f.default)}" for f in named]
    options += ["layers=all"] if mechanism.slot in LAYER_SLOTS else []
    return ", ".join(options + [f"recipe={name}" for name in mechanism.recipes])
