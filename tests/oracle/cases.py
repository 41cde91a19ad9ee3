"""What the equations are tested on, as cases.yaml has it: shape, mechanism presets, fields of the configuration."""

from pathlib import Path
from typing import Any

import yaml

Case = tuple[str, tuple[str, ...], dict[str, Any]]

CASES: list[Case] = [
    (one, tuple(names), fields[0] if fields else {})
    for shape, names, *fields in yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text())
    for one in (("gpt", "llama") if shape == "both" else (shape,))
]
