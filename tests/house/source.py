"""Reads the package's source files for the house tests; run it as a program to list what breaks the style."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "meshwright"
FILE_LINES = 400
FUNCTION_LINES = 60
TYPED_ROOMS = ("spec", "parallel", "models")
"""Rooms without imports for types alone: these hide circles."""
TORCH_FREE_ROOMS = ("spec", "schedules", "cluster", "planner", "sites")
"""Rooms that a plan from sizes alone reads, which starts without torch."""
INNER_IMPORTS = {
    ("arguments.py", "tyro"): "a third of a second, which a command without flags needn't wait for",
    ("documents.py", "pyarrow"): "a third of a second and 53 MB of each worker, for parquet files alone",
    ("documents.py", "pyarrow.parquet"): "the same",
    **{
        (file, name): "an optional package, and seconds of its imports, for filters alone"
        for file, names in {
            "filters.py": (
                *("datatrove.data", "datatrove.pipeline", "datatrove.pipeline.filters"),
                *("datatrove.pipeline.formatters", "datatrove.utils.word_tokenizers", "datatrove.utils.lid"),
                "fasttext.FastText",
            ),
            "near_duplicates.py": (
                *("datatrove.data", "datatrove.pipeline.dedup", "datatrove.pipeline.dedup.minhash", "loguru"),
            ),
            "local_executor.py": ("datatrove.executor",),
        }.items()
        for name in names
    },
    ("tokenizer.py", "transformers"): "seconds, for a tokenizer without a tokenizer.json alone",
    ("tensorboard.py", "tensorboard.compat.proto"): "a second of protocol buffers, on rank 0 alone and after the fork",
    ("tensorboard.py", "tensorboard.summary.writer.record_writer"): "the same",
    ("ray_cluster.py", "ray"): "an optional package",
    ("ray_node.py", "ray"): "an optional package, which is there where this runs",
    ("trackio.py", "trackio"): "an optional package, in a thread of rank 0 alone",
    ("wandb.py", "wandb"): "the same",
    ("mlflow.py", "mlflow.entities"): "the same",
    ("mlflow.py", "mlflow.tracking"): "the same",
}
"""Packages that may be imported inside of a function, each with its reason; never a module of ours."""
COMPAT = PACKAGE / "torch_compat"
USED_IN_PLACE = COMPAT / "attributes.py"
"""States the private attributes of torch's objects that any file may use."""
NOT_OF_TORCH = {
    **dict.fromkeys(("_fields", "_asdict", "_replace", "_exit"), "public: of a NamedTuple, and os._exit"),
    **dict.fromkeys(("_attn_implementation", "_experts_implementation"), "fields of transformers' configs"),
    **dict.fromkeys(
        ("_is_hf_initialized", "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_load_missing"),
        "attributes of transformers' models",
    ),
    "_is_local": "set by `parameter_slices` on its own copies of configs",
    "_close": "our own, of a base class in another file",
}
"""Private attributes that aren't torch's and whose owner is another file, each with the reason."""
SUB_ROOMS_BELOW = {
    "spec/axes": "files that each state one axis's facts; the room asks for all of them",
}
"""Sub-rooms that their room imports, each with its reason; every other one builds on its room, or the room on it."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[Path, ast.Module]:
    """Every module of the package, parsed."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def nodes(module: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a module, which each rule reads anew."""
    return tuple(ast.walk(module))


def place(path: Path, node: ast.AST | None = None) -> str:
    """``meshwright/x.py:12``."""
    line = getattr(node, "lineno", 1)
    return f"{path.relative_to(ROOT)}:{line}"


def missing_docstrings() -> Iterator[str]:
    """Names a stranger may use that don't say what they are."""
    for path, module in modules().items():
        if not ast.get_docstring(module):
            yield f"{place(path)} module has no docstring"
        if path.name != "__main__.py":
            yield from _undocumented(path, module, "")


def _undocumented(path: Path, parent: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for node in parent.body:
        if not isinstance(node, (ast.ClassDef, *Function.__args__)) or node.name.startswith("_"):
            continue
        name = prefix + node.name
        if not ast.get_docstring(node) and not _is_overload(node):
            yield f"{place(path, node)} {name} has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(path, node, f"{name}.")
            if node.name.endswith("Config"):
                yield from _undocumented_fields(path, node)


def _is_overload(node: ast.AST) -> bool:
    names = [ast.unparse(item) for item in getattr(node, "decorator_list", [])]
    return any(name.endswith(("overload", ".setter")) for name in names)


def _undocumented_fields(path: Path, config: ast.ClassDef) -> Iterator[str]:
    following = [*config.body[1:], None]
    for node, after in zip(config.body, following):
        if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
            continue
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if not (documented and isinstance(after.value.value, str)):
            yield f"{place(path, node)} {config.name}.{ast.unparse(node.target)} has no docstring under it"


def prints() -> Iterator[str]:
    """Calls of print: output belongs to cli and monitor, through rich."""
    for path, module in modules().items():
        for node in nodes(module):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield f"{place(path, node)} calls print"


def environment_reads() -> Iterator[str]:
    """Uses of the environment outside launch/."""
    names = {"environ", "getenv", "putenv", "environb"}
    for path, module in modules().items():
        if path.is_relative_to(PACKAGE / "launch"):
            continue
        for node in nodes(module):
            if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
                yield f"{place(path, node)} uses os.{node.attr}"
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                yield from (f"{place(path, node)} imports os.{a.name}" for a in node.names if a.name in names)


def inner_imports() -> Iterator[str]:
    """Imports inside functions, where they hide what a module needs: who starts a job loads it by name."""
    for path, module in modules().items():
        functions = [node for node in nodes(module) if isinstance(node, Function)]
        inside = {id(node): node for function in functions for node in ast.walk(function)}.values()
        for node in inside:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                if (path.name, name) not in INNER_IMPORTS:
                    yield f"{place(path, node)} imports {name} inside a function"


def type_only_imports() -> Iterator[str]:
    """Imports under TYPE_CHECKING, which hide circles."""
    for path, module in modules().items():
        for node in nodes(module) if path.relative_to(PACKAGE).parts[0] in TYPED_ROOMS else ():
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                yield f"{place(path, node)} imports for types alone"


def lazy_tables() -> Iterator[str]:
    """Calls of import_module outside of the two tables: the verbs of the command line, the names of the public API."""
    for path, module in modules().items():
        relative = path.relative_to(PACKAGE)
        if relative.parts[0] not in ("jobs", "cli") or relative.as_posix() == "cli/main.py":
            continue
        for node in nodes(module):
            if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).endswith("import_module"):
                yield f"{place(path, node)} imports by name"


def oversized() -> Iterator[str]:
    """Files and functions over the limit, unless line 1 gives the reason (a comment ``# long: why``)."""
    for path, module in modules().items():
        lines = path.read_text(encoding="utf-8").splitlines()
        if lines and lines[0].startswith("# long: "):
            continue
        if len(lines) > FILE_LINES:
            yield f"{place(path)} has {len(lines)} lines, over {FILE_LINES}"
        for node in nodes(module):
            if isinstance(node, Function):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > FUNCTION_LINES:
                    yield f"{place(path, node)} {node.name} has {size} lines, over {FUNCTION_LINES}"


def forward_assignments() -> Iterator[str]:
    """Replaced forwards outside of `parallel.forward_stack`: nobody could say in which order they lie."""
    for path, module in modules().items():
        # In the planner a layer's cost has a forward too, which is a number.
        if path.is_relative_to(PACKAGE / "planner") or path.name == "forward_stack.py":
            continue
        for node in nodes(module):
            if isinstance(node, ast.Attribute) and node.attr == "forward" and isinstance(node.ctx, ast.Store):
                yield f"{place(path, node)} replaces {ast.unparse(node)}; use wrap_forward"


def torch_below() -> Iterator[str]:
    """Imports of torch in the rooms that are read without it."""
    for path, module in modules().items():
        if path.relative_to(PACKAGE).parts[0] in TORCH_FREE_ROOMS:
            for node in nodes(module):
                if any(name.split(".")[0] == "torch" for name in _imported(node)):
                    yield f"{place(path, node)} imports torch"


def private_torch() -> Iterator[str]:
    """Private names of torch outside of `torch_compat`, but for attributes that it states for use in place."""
    in_place = _stated_names(USED_IN_PLACE)
    for path, module in modules().items():
        if path.is_relative_to(COMPAT):
            continue
        own_names = _own_names(module)
        for node in nodes(module):
            for name in _names_of_torch(node):
                if any(_is_private(part) for part in name.split(".")):
                    yield f"{place(path, node)} uses {name}; torch_compat is where private names stand"
            for name in _private_attributes(node):
                if name not in in_place | own_names and name not in NOT_OF_TORCH:
                    yield f"{place(path, node)} uses {name}; torch_compat is where private names of torch stand"


def unstated_private_names() -> Iterator[str]:
    """Private names of torch that a file of `torch_compat` uses and doesn't state, so that no test looks them up."""
    for path, module in modules().items():
        if not path.is_relative_to(COMPAT) or path.name == "__init__.py":
            continue
        stated, own_names = _stated_names(path) | _stated_names(USED_IN_PLACE), _own_names(module)
        for node in nodes(module):
            names = [name.split(".")[-1] for name in _names_of_torch(node) if any(map(_is_private, name.split(".")))]
            names += [name for name in _private_attributes(node) if name not in own_names]
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_private(node.value):
                names.append(node.value)
            yield from (f"{place(path, node)} uses {name} and doesn't state it" for name in names if name not in stated)


def _is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_[A-Za-z]\w*", name))


def _stated_names(path: Path) -> set[str]:
    """Every part of the paths in a file's PRIVATE_NAMES, with names that a loop fills in."""
    (table,) = (
        node.value
        for node in modules()[path].body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PRIVATE_NAMES"
    )
    texts = [node.value for node in ast.walk(table) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {part for text in texts if " " not in text for part in re.split(r"[.:]", text)}


def _own_names(module: ast.Module) -> set[str]:
    """Names that a file defines: functions, classes, variables, attributes of its own objects."""
    names = set()
    for node in nodes(module):
        if isinstance(node, (ast.ClassDef, *Function.__args__)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _private_attributes(node: ast.AST) -> list[str]:
    """The private attribute that an expression names of an object that isn't its own, also by getattr and hasattr."""
    if isinstance(node, ast.Attribute) and _is_private(node.attr):
        is_base = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
        return [] if is_base or _is_own(node.value) else [node.attr]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
        attribute = node.args[1]
        if isinstance(attribute, ast.Constant) and _is_private(str(attribute.value)):
            return [str(attribute.value)]
    return []


def _names_of_torch(node: ast.AST) -> list[str]:
    """Dotted names of torch that a statement imports or an expression names."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
    if isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] in ("torch", "dist"):
        return [name for name in [ast.unparse(node)] if name.replace(".", "").isidentifier()]
    return []


def import_circles() -> Iterator[str]:
    """Modules that import each other, whether at the top, inside of functions or for types alone."""
    names = {
        path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in modules()
    }
    known = set(names.values())
    graph: dict[str, set[str]] = {}
    for path, module in modules().items():
        imported = {name for node in nodes(module) for name in _imported(node)}
        graph[names[path]] = {name for name in imported if name in known} - {names[path]}
    reached = {name: _reachable(graph, name) for name in graph}
    seen: set[str] = set()
    for name in sorted(graph):
        circle = {other for other in reached[name] if name in reached[other]}
        if circle and name not in seen:
            seen |= circle
            yield f"{' <-> '.join(sorted(circle))} import each other"


def two_way_rooms() -> Iterator[str]:
    """Sub-rooms that import their room and are imported by it, so that neither can be read first."""
    imports: dict[tuple[str, str], list[str]] = {}
    for path, module in modules().items():
        room = path.parent.relative_to(PACKAGE).as_posix()
        for node in nodes(module):
            for name in _imported(node):
                target = ROOT / name.replace(".", "/")
                if name.startswith("meshwright.") and target.with_suffix(".py").exists():
                    other = target.parent.relative_to(PACKAGE).as_posix()
                    imports.setdefault((room, other), []).append(f"{place(path, node)} imports {name}")
    for (room, other), lines in sorted(imports.items()):
        nested = other.startswith(f"{room}/") and room != "."
        if nested and (other, room) in imports and other not in SUB_ROOMS_BELOW:
            yield f"{lines[0]}, and {other}/ imports {room}/"


def _imported(node: ast.AST) -> Iterator[str]:
    """Modules that a statement imports; of ``from a import b`` both a.b, which may be one, and a."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
        # `from package import module` needs the package itself for nothing else.
        if not (ROOT / node.module.replace(".", "/")).is_dir():
            yield node.module


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph[waiting.pop()] - reached:
            reached.add(name)
            waiting.append(name)
    return reached


def stale_arguments() -> Iterator[str]:
    """Names under ``Args:`` of a docstring that the function, or the class's ``__init__``, has no parameter of."""
    for path, module in modules().items():
        for node in nodes(module):
            if isinstance(node, Function):
                yield from _stale_names(path, node, ast.get_docstring(node) or "")
            elif isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, Function) and method.name == "__init__":
                        yield from _stale_names(path, method, ast.get_docstring(node) or "")


def _stale_names(path: Path, function: Function, docstring: str) -> Iterator[str]:
    arguments = function.args
    known = {item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    known |= {item.arg for item in (arguments.vararg, arguments.kwarg) if item is not None}
    _, _, section = docstring.partition("Args:\n")
    for line in section.split("\n\n")[0].splitlines():
        # Entries are indented once; what continues one is indented further.
        if entry := re.match(r"    ([*\w]+(?:, [*\w]+)*): ", line):
            for name in entry[1].split(", "):
                if name.strip("*") not in known:
                    where = f"{place(path, function)} {function.name}"
                    yield f"{where}'s docstring explains '{name}', which isn't a parameter"


RULES = (
    missing_docstrings,
    stale_arguments,
    prints,
    environment_reads,
    oversized,
    forward_assignments,
    inner_imports,
    lazy_tables,
    type_only_imports,
    torch_below,
    private_torch,
    unstated_private_names,
    import_circles,
    two_way_rooms,
)


def main() -> int:
    """Prints what breaks the style; the exit status is 1 when anything does."""
    found = [line for rule in RULES for line in rule()]
    for line in found:
        print(line)
    print(f"house: {len(modules())} modules, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
