"""Pages of HTML from the templates beside this file, without any external file.

Whatever a run directory holds is data: the environment escapes every value that a template writes, and only what a
template has rendered counts as markup.
"""

from __future__ import annotations

import re
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
    environment.filters["percent"] = "{:.2%}".format
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
_section_contents = macro("elements.html", "section_contents")


def page(
    page_title: str,
    sections: Sequence[Section],
    live: Sequence[tuple[str, str]] | None = None,
    script: str = "live.js",
) -> str:
    """Renders an HTML document.

    Args:
        page_title: of the document.
        sections: its contents; a section without elements is left out, on a live page it is hidden.
        live: action and label of each button of a page that a server keeps up to date; None for one without a script.
        script: file beside the templates that keeps the page up to date.
    """
    keyed = [(section_id(heading), heading, elements) for heading, elements in sections]
    template = _environment().get_template("page.html")
    return template.render(title=page_title, sections=keyed, live=live, script=script)


def login_page(name: str, token_place: str) -> str:
    """Renders a document that asks for the token of a served page; it shows nothing of what that page shows.

    Args:
        name: of the page.
        token_place: where its token is, in words.
    """
    return _environment().get_template("login.html").render(name=name, token_place=token_place)


def breakable(text: str) -> Markup:
    """Returns a text that may be broken behind its commas; what is copied from the page is the text as it was."""
    return Markup(",<wbr>").join(text.split(","))


def section_id(heading: str) -> str:
    """Returns the id of a section in a document."""
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()) or "head"


def section_html(heading: str, elements: Sequence[Markup]) -> str:
    """Renders the contents of a section, as `page` writes them; empty without elements."""
    return str(_section_contents(heading, elements)) if elements else ""
