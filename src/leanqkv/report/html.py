"""HTML pages from templates."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .. import __version__
from ..files import write_text

TEMPLATES = Path(__file__).parent


def render(template: Path, **values: Any) -> str:
    """Render a template with `values`, the reports' style sheet as `css` and the package's `version`."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    return environment.get_template(template.name).render(css=Markup(css), version=__version__, **values)


def write_report(directory: Path, template: str, markdown: str, **values: Any) -> Path:
    """Write the Markdown as table.md and a page as report.html; return the page's path."""
    page = directory / "report.html"
    write_text(directory / "table.md", markdown)
    write_text(page, render(TEMPLATES / template, **values))
    return page
