"""HTML pages from templates."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .. import __version__


def render(template: Path, **values: Any) -> str:
    """Render a template with `values`, the reports' style sheet as `css` and the package's `version`."""
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return environment.get_template(template.name).render(css=Markup(css), version=__version__, **values)
