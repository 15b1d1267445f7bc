"""Makes the pages of the site that docs/ doesn't have: the reference from the source, the repository's other files.

mkdocs calls `on_files` and `on_page_markdown` (``hooks`` in mkdocs.yml). Links are written as the repository needs
them, ``../examples/hooks.py`` or ``docs/planning.md``, and lead to the site's page of that file here. A link to a file
without a page stays as it is, and the strict build refuses it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import os
import posixpath
import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import meshwright  # noqa: E402
from meshwright.cli.main import VERBS, main  # noqa: E402
from meshwright.cluster.catalogue import devices as known_devices  # noqa: E402
from meshwright.cluster.catalogue import links as known_links  # noqa: E402
from meshwright.config import Config  # noqa: E402
from meshwright.schedules.spec import known_schedules  # noqa: E402
from meshwright.spec.axes import known_axes  # noqa: E402

COPIES = MappingProxyType(
    {
        "README.md": "index.md",
        "CONTRIBUTING.md": "contributing.md",
        "CHANGELOG.md": "changelog.md",
        "benchmarks/README.md": "benchmarks.md",
    }
)
"""Markdown files of the repository outside of docs/, and the site's page of each."""

LISTINGS = MappingProxyType({"examples": "examples.md", "recipes": "recipes.md"})
"""Folders of short programs, and the page that shows each file whole."""

LINK = re.compile(r"(?<!!)\]\(([^)#\s]+)(#[^)\s]*)?\)")
"""A markdown link: its target, and the anchor in it."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made here."""
    texts = {
        **{page: (ROOT / source).read_text(encoding="utf-8") for source, page in COPIES.items()},
        **{page: listing(folder) for folder, page in LISTINGS.items()},
        "reference/command-line.md": command_line(),
        "reference/settings.md": settings(),
        "reference/python.md": python_names(),
        "reference/catalogue.md": catalogue(),
    }
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links between files of the repository to the site's pages."""
    uri = page.file.src_uri
    source = next((source for source, made in COPIES.items() if made == uri), f"docs/{uri}")
    return LINK.sub(lambda match: f"]({site_target(source, uri, match[1])}{anchor(match)})", markdown)


def anchor(match: re.Match[str]) -> str:
    """Returns the anchor of a link; of one to a listed file, the heading that shows it."""
    folder, _, name = match[1].rpartition("/")
    listed = posixpath.basename(folder) in LISTINGS and name
    return f"#{heading_id(name)}" if listed else match[2] or ""


def site_target(source: str, uri: str, target: str) -> str:
    """Returns where a link of a repository's file leads on the site.

    Args:
        source: path of the file in the repository.
        uri: the site's page of that file.
        target: the link as it is written there, without its anchor.
    """
    if "://" in target or target.startswith("mailto:"):
        return target
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    folder = path if path in LISTINGS else posixpath.dirname(path)
    if path in COPIES:
        made = COPIES[path]
    elif folder in LISTINGS and (ROOT / path).exists():
        made = LISTINGS[folder]
    elif path.startswith("docs/"):
        made = path.removeprefix("docs/")
    else:
        return target
    return os.path.relpath(made, posixpath.dirname(uri) or ".")


def heading_id(name: str) -> str:
    """Returns the id of the heading that shows a listed file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def listing(folder: str) -> str:
    """Shows every file of a folder."""
    kinds = {".py": "python", ".toml": "toml"}
    paths = sorted(path for path in (ROOT / folder).iterdir() if path.suffix in kinds)
    parts = [f"# {folder.capitalize()}\n\nEvery file of `{folder}/`, as it is.\n"]
    for path in paths:
        text = path.read_text(encoding="utf-8")
        parts.append(f"## {path.name} {{ #{heading_id(path.name)} }}\n\n```{kinds[path.suffix]}\n{text}```\n")
    return "\n".join(parts)


def command_line() -> str:
    """Shows what ``meshwright VERB --help-all`` prints, of every verb."""
    parts = [
        "# Command line\n\nWhat `meshwright VERB --help-all` prints. Flags are fields of the [settings](settings.md): "
        "`--train.steps 100` is `steps = 100` under `[train]` in a recipe. Short forms: `--model` for `--model.name`, "
        "`--data` for `--data.paths`.\n"
    ]
    for verb, purpose in VERBS.items():
        parts.append(f"## {verb}\n\n{purpose[0].upper()}{purpose[1:]}.\n\n```text\n{help_text(verb)}\n```\n")
    return "\n".join(parts)


def help_text(verb: str) -> str:
    """Returns a verb's help without the frames that tyro draws."""
    printed, width = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "110"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([verb, "--help-all"])
    finally:
        os.environ.pop("COLUMNS") if width is None else os.environ.update(COLUMNS=width)
    lines = []
    for line in printed.getvalue().splitlines():
        title = re.fullmatch(r"╭─ (.*?) ─*╮", line)
        framed = re.fullmatch(r"│ (.*?)\s*│", line)
        if title:
            lines += ["", f"{title[1]}:"]
        elif framed:
            lines += [] if set(framed[1].strip()) == {"─"} else [f"  {framed[1]}"]
        elif not line.startswith("╰"):
            lines.append(line)
    return "\n".join(lines).strip()


def settings() -> str:
    """Lists the fields of every public config, with type, default and docstring."""
    kinds = [getattr(meshwright, name) for name in sorted(meshwright.__all__) if name.endswith("Config")]
    first = [meshwright.RunConfig]
    parts = [
        "# Settings\n\nEvery config is a frozen dataclass, a table of a recipe and a prefix of flags at once: "
        "`TrainConfig.steps` is `[train] steps = 100` in TOML and `--train.steps 100` on the command line.\n"
    ]
    for kind in [*first, *(kind for kind in kinds if kind not in first)]:
        meanings = field_docstrings(kind)
        parts.append(f"## {kind.__name__}\n\n{plain(inspect.getdoc(kind) or '')}\n")
        parts.append("| field | type | default | what it is |\n|---|---|---|---|")
        for field in dataclasses.fields(kind):
            shown = [f"`{field.name}`", field_type(kind, field.name), default(field), plain(meanings[field.name])]
            parts.append("| " + " | ".join(map(cell, shown)) + " |")
        parts.append("")
    return "\n".join(parts)


def cell(text: str) -> str:
    """Returns text for a table: a bar ends a cell, but not inside of code."""
    parts = text.split("`")
    return "`".join(part if index % 2 else part.replace("|", "\\|") for index, part in enumerate(parts))


def field_docstrings(kind: type[Config]) -> dict[str, str]:
    """Returns the docstring under each field of a config."""
    bases = [base for base in kind.__bases__ if base is not Config and issubclass(base, Config)]
    meanings = {name: text for base in bases for name, text in field_docstrings(base).items()}
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, tree.body[1:]):
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and documented:
            meanings[node.target.id] = inspect.cleandoc(after.value.value)
    return meanings


def field_type(kind: type[Config], name: str) -> str:
    """Returns a field's type as text; a config's leads to its table."""
    hint = typing.get_type_hints(kind)[name]
    if isinstance(hint, type) and issubclass(hint, Config):
        return f"[{hint.__name__}](#{hint.__name__.lower()})" if hasattr(meshwright, hint.__name__) else hint.__name__
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return f"`{text.replace('typing.', '').replace('NoneType', 'None')}`"


def default(field: dataclasses.Field[Any]) -> str:
    """Returns a field's default as text."""
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else None
    return "" if made is None or isinstance(made, Config) else f"`{made!r}`"


def plain(text: str) -> str:
    """Returns a docstring as one line of markdown."""
    return " ".join(text.split()).replace("``", "`")


def python_names() -> str:
    """Lists the public names of `meshwright`, each as mkdocstrings shows its docstring."""
    titles = {
        "Functions": lambda name, module: name[0].islower() and "strategy" not in module,
        "Custom loops": lambda name, module: "strategy" in module,
        "Results": lambda name, module: module.startswith("meshwright.jobs") and not name.endswith("Config"),
        "Hooks": lambda name, module: module.endswith("hooks"),
        "Errors": lambda name, module: module.endswith("errors"),
        "Values": lambda name, module: not name.endswith("Config"),
    }
    names, parts = dict(meshwright._MODULES), [PYTHON_HEAD]
    for title, belongs in titles.items():
        chosen = {name: module for name, module in names.items() if belongs(name, module)}
        parts.append(f"## {title}\n")
        parts += [
            f"::: {defining_module(module, name)}.{name}\n{inherited_members(name)}" for name, module in chosen.items()
        ]
        names = {name: module for name, module in names.items() if name not in chosen}
    return "\n".join(parts)


PYTHON_HEAD = """# Python functions and types

Every name of `import meshwright` but the configs, whose fields the [settings](settings.md) list. The guide is
[From Python](../python.md).
"""


def inherited_members(name: str) -> str:
    """Returns the option that shows a public type's inherited members, where a base of it is in no list itself."""
    bases = getattr(getattr(meshwright, name), "__mro__", ())[1:]
    is_split = any(
        base.__module__.startswith("meshwright.") and base.__name__ not in meshwright.__all__ for base in bases
    )
    return "    options:\n      inherited_members: true\n" if is_split else ""


def defining_module(module: str, name: str) -> str:
    """Returns the module whose source defines a name that a package exports."""
    source = ROOT / module.replace(".", "/") / "__init__.py"
    if source.exists():
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
                return str(node.module)
    return module


def catalogue() -> str:
    """Lists the mesh axes, the schedules, and the devices and links that a cluster's text may name."""
    parts = ["# Axes, schedules, devices\n", *axes(), *schedules(), *devices()]
    return "\n".join(parts)


def axes() -> Iterator[str]:
    """Lists the axes of the mesh, outermost first, with the facts that the groups follow from."""
    yield (
        "## Axes of the mesh\n\nOutermost first, so the nearest ranks are neighbours along the last. Every group "
        "of ranks follows from these facts ([how](../parallelism.md#how-a-layout-becomes-groups)).\n\n"
        "| axis | its ranks read | its ranks hold | carves | other names | purpose |\n|---|---|---|---|---|---|"
    )
    for name, axis in known_axes().items():
        reads = {"same": "the same rows and tokens", "rows": "other rows", "tokens": "other tokens of the same rows"}
        holds = {"copy": "a copy", "shard": "a part of each weight", "stage": "some of the layers"}
        carved = " x ".join(f"`{other}`" for other in axis.carves)
        aliases = ", ".join(f"`{alias}`" for alias in axis.aliases)
        facts = f"{reads[axis.reads.value]} | {holds[axis.holds.value]} | {carved} | {aliases}"
        yield f"| `{name}` | {facts} | {axis.purpose} |"


def schedules() -> Iterator[str]:
    """Lists the pipeline schedules."""
    yield (
        "\n## Pipeline schedules\n\nHow they compare: [Pipeline schedules](../schedules.md).\n\n"
        "| name | take it for | stages per rank | source |\n|---|---|---|---|"
    )
    for name, schedule in known_schedules().items():
        yield f"| `{name}` | {schedule.purpose} | {schedule.stages_text} | {schedule.source} |"


def devices() -> Iterator[str]:
    """Lists the catalogue's devices and links."""
    yield (
        "\n## Devices\n\nNames that a cluster's text may have, as in `64xh100` ([Machines](../cluster.md)); figures "
        "are of one device, rates without sparsity.\n\n"
        "| name | memory | bf16 matrix products | memory bandwidth | node |\n|---|---|---|---|---|"
    )
    for name, entry in known_devices().items():
        device = entry.device
        rate = f"{device.peak('bf16') / 1e12:.3g} TFLOP/s"
        figures = f"{device.memory_bytes / 2**30:.1f} GiB | {rate} | {device.bandwidth_bytes_per_s / 1e9:.0f} GB/s"
        yield f"| `{name}` | {figures} | `{entry.node}` |"
    yield "\n## Links\n\n| name | bytes a second and direction | source |\n|---|---|---|"
    for name, link in known_links().items():
        yield f"| `{name}` | {link.bytes_per_s / 1e9:.3g} GB/s | {link.source} |"
