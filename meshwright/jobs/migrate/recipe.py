"""Reads a file of another framework and writes it as a commented recipe.

The file comes from somebody else, so it is data alone: its size is limited, YAML has no tags and no aliases, and of a
shell script the words are read and nothing is run.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import tomli_w
import yaml

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.jobs.migrate.accelerate import ACCELERATE, read_accelerate
from meshwright.jobs.migrate.deepspeed import DEEPSPEED, read_deepspeed
from meshwright.jobs.migrate.foreign import Foreign, Migration, flatten, printable
from meshwright.jobs.migrate.megatron import read_megatron
from meshwright.jobs.migrate.megatron_flags import MEGATRON
from meshwright.jobs.migrate.shell import ScriptFlags, read_script
from meshwright.jobs.migrate.torchtitan import TORCHTITAN, read_torchtitan
from meshwright.jobs.migrate.torchtitan_saved import is_saved_torchtitan, saved_values
from meshwright.jobs.migrate.trl import check_program, is_trl, read_trl
from meshwright.jobs.migrate.trl_keys import TRL
from meshwright.spec.groups import reader
from meshwright.spec.layout import Layout
from meshwright.train.run_config import RunConfig

MOST_BYTES = 1 << 20
"""Largest file that is read."""
_DEEP_KEY = re.compile(r"(?:[\w\"'-]+[ \t]*\.[ \t]*){16}")
"""A key of TOML whose reading would take very long, for its square."""
_MOST_DEPTH = 16
"""Of values of YAML inside one another: each level makes the reading of every other one longer."""
_YAML_STARTS = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)
_YAML_ENDS = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
MOST_KEYS = 2000
"""Keys of a file; those of the frameworks have a hundred or two."""
_OF_TRAINING = dict.fromkeys(
    ("micro-batch-size", "num-layers", "train-iters", "train-samples", "tensor-model-parallel-size")
)
"""Flags of which a command of Megatron-LM has one."""
READERS: Mapping[str, tuple[Foreign, Callable[[Migration, str], None]]] = MappingProxyType(
    {
        "deepspeed": (DEEPSPEED, read_deepspeed),
        "accelerate": (ACCELERATE, read_accelerate),
        "torchtitan": (TORCHTITAN, read_torchtitan),
        "megatron": (MEGATRON, read_megatron),
        "trl": (TRL, read_trl),
    }
)
"""Each framework's tables, and who reads what they don't answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MigratedRecipe:
    """A recipe from another framework's file."""

    framework: str
    """One of `READERS`."""
    text: str
    """The recipe, TOML."""
    layout: Layout
    """Its layout."""
    config: RunConfig
    """What the recipe is read as."""
    carried: int
    """Settings that the file gives, the layout's keys included."""
    needless: tuple[str, ...]
    """Sentences about keys that need no counterpart."""
    missing: tuple[str, ...]
    """Sentences about keys that have none."""


def migrate(
    path: Path,
    devices: int | None = None,
    model: str | None = None,
    data: Sequence[str] = (),
    name: str = "recipe.toml",
) -> MigratedRecipe:
    """Turns a file of DeepSpeed, accelerate, torchtitan, Megatron-LM or TRL into a recipe.

    Args:
        path: ``.json``, ``.yaml``, ``.toml``, or a shell script or list of flags.
        devices: ranks, where the file doesn't say.
        model: model's name, in place of the file's.
        data: files, directories and globs of text.
        name: of the recipe's file, for its comments.

    Raises:
        ConfigError: when the file can't be read, is none of these, contradicts itself, or asks for a run that can't be.
    """
    try:
        framework, values, said, open_words = _read(path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {printable(str(error))}") from None
    foreign, read = READERS[framework]
    if len(values) > MOST_KEYS:
        raise ConfigError(f"{path} has {len(values)} keys, and at most {MOST_KEYS} are read; give the training's alone")
    config = Migration(foreign=foreign, values=values, devices=devices or said)
    try:
        read(config, str(path))
        config.finish()
        if model is not None:
            _set_model(config, model)
        if data:
            config.set("data.paths", list(data), why="--data")
        config.missing += (printable(sentence) for sentence in open_words)
        _set_batch(config)
        layout = _layout(config)
        _drop_idle_settings(config, RunConfig.from_dict(tomllib.loads(_recipe_text(config, layout, path.name, name))))
        text = _recipe_text(config, layout, path.name, name)
        run_config = RunConfig.from_dict(tomllib.loads(text))
        run_config.check_all()
    except MeshwrightError as error:
        raise ConfigError(f"{path} ({framework}): {printable(str(error))}") from None
    _check_batch(path, run_config, layout)
    return MigratedRecipe(
        framework=framework,
        text=text,
        layout=layout,
        config=run_config,
        carried=len(config.settings) + len(config.layout),
        needless=tuple(config.needless),
        missing=tuple(config.missing),
    )


def _read(path: Path) -> tuple[str, dict[str, object], int | None, list[str]]:
    """Returns the framework, its keys, the ranks that a launcher's flags say, and sentences about the script."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"it can't be read ({error.strerror}); give the path of the other framework's file") from None
    if len(data) > MOST_BYTES:
        raise ConfigError(f"it has more than {MOST_BYTES >> 10} KiB, which no configuration of these frameworks has")
    try:
        text = data.decode("utf-8")
        tree: object = None
        if path.suffix == ".json":
            tree = json.loads(text, object_pairs_hook=_without_repeats)
        elif path.suffix in (".yaml", ".yml"):
            tree = _load_yaml(text)
        elif path.suffix == ".toml":
            if _DEEP_KEY.search(text):
                raise ConfigError("a key of more than 16 parts, which no configuration of torchtitan has")
            tree = tomllib.loads(text)
        else:
            return _read_flags(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"it is not valid {path.suffix[1:].upper() or 'text'}: {str(error)[:200]}") from None
    if not isinstance(tree, Mapping):
        held = "nothing" if tree is None else f"a {type(tree).__name__}"
        raise ConfigError(f"it holds {held}; a configuration is a mapping of keys to values")
    if path.suffix == ".json" and is_saved_torchtitan(tree):
        return "torchtitan", saved_values(tree), None, []
    framework = {".json": "deepspeed", ".toml": "torchtitan"}.get(path.suffix, "accelerate")
    values = flatten(tree)
    if path.suffix != ".toml" and is_trl(values):
        return "trl", values, None, []
    if not any(_is_known(key, READERS[framework][0]) for key in values):
        raise ConfigError(f"it has none of the keys of a configuration of {framework}; docs/migrating.md has them")
    return framework, values, None, []


def _is_known(key: str, foreign: Foreign) -> bool:
    """Returns whether a key is one that a framework's configuration begins with."""
    known = {*foreign.settings, *foreign.layout_keys}
    return key in known or any(key.partition(".")[0] == name.partition(".")[0] for name in known)


def _load_yaml(text: str) -> object:
    """Reads YAML without tags, anchors and aliases: plain values, each written out, and few inside another."""
    depth = 0
    for token in yaml.scan(text):
        depth += isinstance(token, _YAML_STARTS) - isinstance(token, _YAML_ENDS)
        if depth > _MOST_DEPTH:
            raise ConfigError(
                f"line {token.start_mark.line + 1}: nested more than {_MOST_DEPTH} deep, which no configuration of "
                "accelerate is"
            )
        if isinstance(token, (yaml.TagToken, yaml.AnchorToken, yaml.AliasToken)):
            raise ConfigError(
                f"line {token.start_mark.line + 1}: a YAML tag, anchor or alias, which aren't read; write the value out"
            )
    return yaml.load(text, _YamlLoader)


class _YamlLoader(yaml.SafeLoader):
    """Plain values, without a key that is there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        names = [key.value for key, _ in node.value]
        _without_repeats([(str(name), None) for name in names])
        return super().construct_mapping(node, deep)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns a mapping whose keys are each there once.

    Raises:
        ConfigError: one is there twice, of which a reader would take the last in silence.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ConfigError(f"{printable(name)[:60]} stands in it twice; leave one of them")
    return values


def _read_flags(text: str) -> tuple[str, dict[str, object], int | None, list[str]]:
    script = read_script(text)
    framework = _framework_of(script)
    values = {_key(flag, framework): _scalar(words) for flag, words in script.flags.items()}
    launcher = {name.replace("_", "-"): words for name, words in script.launcher.items()}
    # torchrun counts processes of a node, accelerate all of them.
    names = ("nproc-per-node", "nnodes") if "num-processes" not in launcher else ("num-processes", "")
    per_node, nodes = (_scalar(launcher.get(key, ["?"])[:1]) for key in names)
    nodes = 1 if names[1] not in launcher else nodes
    said = per_node * nodes if isinstance(per_node, int) and isinstance(nodes, int) else None
    notes = []
    if file := launcher.get("config-file"):
        notes.append(f"--config_file {' '.join(file)}: its layout isn't read; meshwright new --from that file says it")
    decided = {f"--{name} {' '.join(words)}".rstrip() for name, words in script.flags.items()}
    for text in _grouped(script.undecided):
        if text not in decided:
            notes.append(f"{text}: under a condition of the script, which isn't run")
    if script.program and not re.search("gpt|torchtitan|train$|train.py|sft|run_clm", script.program):
        notes.append(f"{script.program}: models are causal language models, and code of its own isn't brought along")
    if framework == "megatron":
        _refuse_other_program(values)
    for name, value in values.items():
        if "$" in str(value) and _is_number_of(name, READERS[framework][0]):
            raise ConfigError(f"--{name} {value}: only a run of the script knows it; write the value out")
    return framework, values, said, notes


def _framework_of(script: ScriptFlags) -> str:
    """Returns whose flags a command has; refuses one of TRL's other trainers."""
    # One of its keys is many a script's own.
    if script.program.startswith("trl ") or is_trl([flag.replace("-", "_") for flag in script.flags], least=2):
        check_program(script.program)
        return "trl"
    is_torchtitan = any("." in name for name in script.flags) or {"module", "config"} <= script.flags.keys()
    return "torchtitan" if is_torchtitan else "megatron"


def _key(flag: str, framework: str) -> str:
    """Returns a flag as its framework's table writes it."""
    if framework == "megatron":
        return flag.replace("_", "-")
    return flag.replace("-", "_") if framework == "trl" or "." in flag else flag


def _grouped(words: list[str]) -> list[str]:
    """Returns flags with their values, each once, and what else is under a condition, as one text each."""
    groups: list[list[str]] = []
    for word in words:
        is_own = word.startswith("--") or (groups and groups[-1][0].startswith("--") and "=" in word)
        if is_own or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return list(dict.fromkeys(" ".join(group) for group in groups))


def _refuse_other_program(values: Mapping[str, object]) -> None:
    """Refuses flags of a program that isn't Megatron-LM's, whose words would be read as what they don't mean."""
    if values.keys() & _OF_TRAINING:
        return
    for name in ("deepspeed-config", "deepspeed"):
        if str(values.get(name, "")).endswith(".json"):
            raise ConfigError(
                f"the layout is in {str(values[name])[:200]}, and the other flags are the script's own; give that file "
                "to --from"
            )
    raise ConfigError(
        f"its command has none of the flags that training with Megatron-LM has (--{', --'.join(_OF_TRAINING)}); "
        "give that command, or the file that it reads"
    )


def _is_number_of(name: str, foreign: Foreign) -> bool:
    """Returns whether a flag is read as a number, a setting or a key of the layout."""
    return name in foreign.settings or name in foreign.layout_keys


def _scalar(words: list[str]) -> object:
    """Returns a flag's values as one: true without any, a number where it is one."""
    text = " ".join(words)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or True


def _set_model(config: Migration, model: str) -> None:
    """Puts the user's model in place of the file's, whose sizes would contradict it."""
    for name in [name for name in config.settings if name.startswith("model.")]:
        carried = config.settings.pop(name)
        if carried.origin:
            config.needless.append(f"{carried.origin} ({name}): --model {model} goes over it")
    config.set("model.name", model, why="--model")


def _drop_idle_settings(config: Migration, recipe: RunConfig) -> None:
    """Takes out settings that the others leave without effect, of which the file's own framework makes nothing too."""
    for setting, _ in recipe.idle_settings():
        if (carried := config.settings.pop(setting, None)) is not None and carried.origin:
            config.needless.append(f"{carried.origin} ({setting}): has no effect with the other settings")


def _set_batch(config: Migration) -> None:
    """Gives a recipe a batch that its ranks can share, where the file says none."""
    if "train.batch" in config.settings:
        return
    layout = _layout(config)
    share = reader(0, layout.degrees)[1] * layout.microbatches
    rows = -(-RunConfig().train.batch // share) * share
    config.set("train.batch", rows, why=f"{config.foreign.name}'s file says none, its script does; set it")


def _layout(config: Migration) -> Layout:
    return Layout.parse(",".join(f"{key}={carried.value}" for key, carried in config.layout.items()))


def _check_batch(path: Path, config: RunConfig, layout: Layout) -> None:
    """Refuses a layout whose ranks aren't those of the file, and rows that its readers can't share."""
    if config.devices != layout.world:
        raise ConfigError(
            f"{path}: its degrees multiply to {layout.world} ranks, and it is for {config.devices} devices; give "
            f"--devices {layout.world}"
        )
    share = reader(0, layout.degrees)[1] * layout.microbatches
    if config.train.batch % share:
        raise ConfigError(
            f"{path}: {config.train.batch} rows don't divide over {share} micro-batches of all readers; nearest that "
            f"works: {max(1, round(config.train.batch / share)) * share}"
        )


def _recipe_text(config: Migration, layout: Layout, source: str, name: str) -> str:
    """Returns the recipe: what isn't carried over first, then the settings by section."""
    foreign = config.foreign.name
    lines = [
        f"# A run of meshwright, made of {_comment(source)} ({foreign}): meshwright train {_comment(name)} --dry-run"
    ]
    lines.append(
        "# What each key became: docs/migrating.md. Settings without a comment behind them are meshwright's own."
    )
    for title, sentences in (
        ("Not carried over; each with what works instead:", config.missing),
        ("Needless here:", config.needless),
    ):
        if sentences:
            lines += ["#", f"# {title}", *(f"#   {_comment(sentence)}" for sentence in sentences)]
    lines += ["", _line("devices", config.devices, "")]
    lines += [f"#   {key}={item.value}: {_comment(item.origin)}" for key, item in config.layout.items() if item.origin]
    lines.append(_line("layout", str(layout), ""))
    sections: dict[str, list[str]] = {"model": [], "data": [], "train": [], "optimizer": [], "schedule": []}
    for setting, carried in config.settings.items():
        section, _, key = setting.partition(".")
        sections.setdefault(section, []).append(_line(key, carried.value, carried.origin))
    if not any(line.startswith("name = ") for line in sections["model"]):
        sections["model"].insert(0, _line("name", "llama", "stands in: name a type, a directory or module:function"))
    if "data.paths" not in config.settings:
        sections["data"].insert(
            0, '# paths = ["my-text.txt"]          # without any: the Python source of the interpreter'
        )
    for section, assignments in sections.items():
        if assignments:
            lines += ["", f"[{section}]", *assignments]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    """Returns text for a comment: printable, and of bounded length, so that nothing of a file becomes a setting."""
    return printable(text)[:400]


def _line(key: str, value: object, origin: str) -> str:
    """Returns an assignment, with where its value comes from behind it."""
    text = key + tomli_w.dumps({"x": value}).rstrip()[1:]  # a dotted key stays one
    return f"{text:<33} # {_comment(origin)}" if origin else text
