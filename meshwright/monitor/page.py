"""Pages of HTML from the templates beside this file, without any external file.

Whatever a run directory holds is data: the environment escapes every value that a template writes, and only what a
template has rendered counts as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

Section = tuple[str, Sequence[Markup]]
"""Heading and elements of a section."""


@cache
def _environment() -> Environment:
    """Returns the environment: everything is escaped, and a missing value is an error instead of nothing."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["px"] = "{:.1f}".format
    return environment


def macro(template: str, name: str) -> Callable[..., Markup]:
    """Returns a template's macro as a function.

    Args:
        template: file under ``templates``, such as ``elements.html``.
        name: of the macro.
    """

    def render(*args: object, **kwargs: object) -> Markup:
        rendered: Markup = getattr(_environment().get_template(template).module, name)(*args, **kwargs)
        return rendered

    return render


title = macro("elements.html", "title")
note = macro("elements.html", "note")
strong = macro("elements.html", "strong")
preformatted = macro("elements.html", "preformatted")
folded = macro("elements.html", "folded")
tiles = macro("elements.html", "tiles")
table = macro("elements.html", "table")
drawing = macro("elements.html", "drawing")
two_columns = macro("elements.html", "two_columns")


def page(page_title: str, sections: Sequence[Section]) -> str:
    """Renders an HTML document; a section without elements is left out."""
    return _environment().get_template("page.html").render(title=page_title, sections=sections)
