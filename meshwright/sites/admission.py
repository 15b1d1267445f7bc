"""Whether a site may dial in: its model, settings and number must fit the server's."""

from __future__ import annotations

import math

from meshwright.sites.messages import VERSION, Declaration, Hello
from meshwright.sites.settings import ServerSettings

DTYPES = ("float32", "float64")
_MOST_ELEMENTS = 1 << 42


def refusal_of(hello: Hello, declared: Declaration | None, settings: ServerSettings, owner: str) -> tuple[str, bool]:
    """Returns why a site can't dial in, and whether it is in vain to try again; an empty reason admits it.

    Args:
        hello: what it said.
        declared: the model of the server's weights; None before the first site.
        settings: of the server.
        owner: the run that has the site's number at present; empty for none.
    """
    if hello.version != VERSION:
        return f"it speaks version {hello.version} of these messages, and the server {VERSION}", True
    if not 0 <= hello.site < settings.sites:
        return f"outer.site = {hello.site}: the server shares rows among outer.sites = {settings.sites}, from 0", True
    if reason := _difference(hello.declaration, declared, settings):
        return reason, True
    if owner not in ("", hello.run):
        return (
            f"outer.site = {hello.site} is live in another run; give this one another number, or wait until the "
            f"other has been silent for outer.grace_s = {settings.grace_s:g}",
            False,
        )
    return "", False


def _difference(own: Declaration, declared: Declaration | None, settings: ServerSettings) -> str:
    for name, value in settings.agreed().items():
        if name in own.settings and own.settings[name] != value:
            return f"{name} is {own.settings[name]} here and {value} at the server; all sites take the server's"
    if own.dtype not in DTYPES:
        return f"its weights are {own.dtype}; the outer weights are float32 or float64"
    if not own.shapes or any(size < 1 for shape in own.shapes.values() for size in shape):
        return "it declares no weights, or empty ones"
    if sum(math.prod(shape) for shape in own.shapes.values()) > _MOST_ELEMENTS:
        return "it declares more weights than any model has"
    return "" if declared is None else _other_model(own, declared)


def _other_model(own: Declaration, declared: Declaration) -> str:
    """Returns the first difference from the model of the server's weights."""
    for name in sorted(own.shapes.keys() | declared.shapes.keys()):
        here, there = own.shapes.get(name), declared.shapes.get(name)
        if here != there:
            text = [f"has the shape {shape}" if shape is not None else "isn't there" for shape in (here, there)]
            return f"it trains another model: {name} {text[0]} here, and {text[1]} at the server"
    if own.dtype != declared.dtype:
        return f"its weights are {own.dtype}, and the server's {declared.dtype}; take the same precision"
    if own.model != declared.model:
        return "it trains another model: its weights have the same shapes, and its architecture another fingerprint"
    for name in sorted(own.settings.keys() & declared.settings.keys()):
        if own.settings[name] != declared.settings[name]:
            return f"{name} is {own.settings[name]} here and {declared.settings[name]} at the first site"
    return ""
