"""Bad input is refused before a rank starts, in one paragraph with the cure, and leaves no run directory behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from meshwright.cli.arguments import read_config
from meshwright.cli.main import main
from meshwright.errors import ConfigError
from meshwright.jobs.resumption import differences
from meshwright.train.config import ScheduleConfig
from meshwright.train.run_config import RunConfig
from tests.runs import words, write_corpus


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("refusals")
    write_corpus(root / "corpus.txt", 60)
    return root


def refused(root: Path, capsys: pytest.CaptureFixture[str], *more: str, status: int = 2, **options) -> str:
    """Returns the message; it stands alone, and nothing was begun."""
    assert main(words(root, "refused", *more, **options)) == status
    message = capsys.readouterr().err.rpartition("error: ")[2]
    left = (root / "refused").exists()
    shutil.rmtree(root / "refused", ignore_errors=True)
    assert message and "Traceback" not in message and "[rank" not in message
    assert not left
    return message


FLAGS = [
    (["--train.stepz", "3"], ["--train.stepz", "did you mean --train.steps?"]),
    (["--optimiser.lr", "3"], ["--optimiser.lr", "--optimizer.lr"]),
    (["--train.steps", "many"], ["--train.steps 'many': it takes a whole number, as --train.steps 1000\n"]),
    (["--train.steps=2.5"], ["--train.steps '2.5': it takes a whole number, as"]),
    (["--optimizer.lr", "fast"], ["--optimizer.lr 'fast': it takes a number, as --optimizer.lr 0.0"]),
    (["--model.layers", "x"], ["--model.layers 'x': it takes a whole number or None"]),
    (["--train.steps"], ["--train.steps needs a value\n"]),
    (["--data", "--train.steps", "3"], ["--data needs a value\n"]),
    (["--data.paths"], ["--data.paths needs a value\n"]),
    (["--model.sharding", "*.mlp"], ["--model.sharding: it takes pairs", "as --model.sharding NAME VALUE\n"]),
    (["--train.steps", "3", "4"], ["'4' belongs to no flag; a recipe comes first"]),
    (["--data.mask-documents", "maybe"], ["--data.mask-documents maybe: it takes true or false\n"]),
    (["--schedule.shape", "cosne"], ["'cosne': it takes cosine, linear, wsd, constant; did you mean 'cosine'?\n"]),
    (["--schedule.shape", "XX"], ["'XX': it takes cosine, linear, wsd, constant\n"]),
    (["--monitor.display", "sometimes"], ["'sometimes'", "--monitor.display", "auto", "plain"]),
    (["--train.batch", "0"], ["train.batch = 0", "at least 1"]),
    (["--train.steps", "-4"], ["train.steps = -4", "at least 1"]),
    (["--optimizer.beta2", "1.0"], ["optimizer.beta2 = 1.0", "under 1"]),
    (["--schedule.floor", "2"], ["schedule.floor = 2.0", "from 0 to 1"]),
    (["--schedule.warmup", "24"], ["schedule.warmup = 24", "train.steps = 24", "fewer warm-up steps"]),
    (["--optimizer.lr", "nan"], ["optimizer.lr = nan", "finite"]),
    (["--optimizer.clip", "inf"], ["optimizer.clip = inf", "finite"]),
    (["--recovery.hang-s", "nan"], ["recovery.hang_s = nan", "finite"]),
    (["--data.validation-share", "nan"], ["data.validation_share = nan", "finite"]),
    (["--devices", "0"], ["devices = 0", "at least one"]),
    (["--recovery.copies", "0"], ["recovery.copies = 0", "at least 1"]),
    (["--recovery.copies", "2"], ["recovery.copies = 2", "takes 3 nodes", "there is 1", "recovery.copies = 1"]),
    (["--checkpoint.keep", "0"], ["checkpoint.keep = 0", "1 or more"]),
    (["--data.sequence", "0"], ["data.sequence = 0", "1 or more"]),
    (["--launch.collective-s", "0"], ["launch.collective_s = 0", "above 0"]),
    (["--launch.group-s", "1e-9"], ["launch.group_s = 1e-09", "at least 1 second"]),
    (["--launch.collective-s", "0.1"], ["launch.collective_s = 0.1", "at least 1 second"]),
    (["--model.context", "15"], ["data.sequence = 16", "model.context = 15", "shorten the rows"]),
    (["--model", "llama", "--model.context", "15"], ["data.sequence = 16", "leave model.context out"]),
    (["--checkpoint.backend", "tape"], ["checkpoint.backend = 'tape'", "dcp"]),
    (["--model.heads", "5"], ["model.width = 32", "model.heads = 5"]),
    (["--launch.network", "ethernet-26g"], ["ethernet-26g", "ethernet-25g"]),
]
IDLE = [
    (["--fits", "0.9"], ["fits = 0.9", "--layout auto"]),
    (["--schedule.decay-share", "0.4"], ["schedule.decay_share = 0.4", "--schedule.shape wsd"]),
    (["--schedule.shape", "constant", "--schedule.floor", "0.3"], ["schedule.floor = 0.3", "--schedule.shape cosine"]),
    (["--optimizer.weight-decay", "0", "--optimizer.decay", "all"], ["optimizer.decay = all", "weight_decay"]),
    (["--train.sample", "the"], ["train.sample = the", "--train.sample-tokens 200"]),
    (["--evaluation.rows", "4"], ["evaluation.rows = 4", "--evaluation.every 250"]),
    (["--monitor.host", "0.0.0.0"], ["monitor.host = 0.0.0.0", "--monitor.port 8787"]),
    (["--monitor.project", "mine"], ["monitor.project = mine", "--monitor.trackers trackio"]),
    (["--monitor.wait-s", "3"], ["monitor.wait_s = 3", "--monitor.display plain"]),
    (["--monitor.every", "3"], ["monitor.every = 3", "--monitor.display plain"]),
    (["--recovery.no-enabled", "--recovery.back-s", "9"], ["recovery.back_s = 9", "--recovery.enabled"]),
    (["--recovery.no-compare", "--recovery.compare-every", "3"], ["recovery.compare_every = 3", "--recovery.compare"]),
    (["--outer.no-nesterov", "--outer.momentum", "0"], ["outer.nesterov = False", "--outer.momentum 0.6"]),
    (["--outer.staleness", "4"], ["outer.staleness = 4", "--outer.mode bounded"]),
    (["--outer.sites", "2"], ["outer.sites = 2", "--outer.meet HOST:PORT"]),
]
SCHEDULERS = [
    (["--slurm.nodes", "2"], ["--slurm.nodes has no effect without --on slurm"]),
    (["--kubernetes.nodes=2"], ["--kubernetes.nodes=2 has no effect without --on kubernetes"]),
    (["--ray.cpus-per-node", "2"], ["--ray.cpus-per-node", "write --on ray"]),
]
RANKS = [
    (["--recovery.minimum", "3"], ["recovery.minimum = 3", "begins with 2", "recovery.minimum = 2", "--devices 3"]),
    (["--recovery.faults", "kill:rank=2,step=2"], ["kill:rank=2,step=2", "from 0 to 1"]),
    (["--recovery.faults", "kill:rank=-2,step=2"], ["kill:rank=-2,step=2", "-1 on node 0"]),
    (["--recovery.faults", "kill:rank=-101,step=2"], ["kill:rank=-101,step=2", "other nodes"]),
]
LAYOUTS = [
    ("replicate=3", 2, ["multiply to 3", "2 ranks", "--layout replicate=2", "--devices 3"]),
    ("replicate=2,shard=2,zero=3", 2, ["multiply to 4", "2 ranks", "--layout replicate=2"]),
    ("replicte=2", 2, ["unknown key 'replicte'", "did you mean 'replicate'?"]),
    ("replicate", 2, ["'replicate' has no value"]),
    ("replicate=two", 2, ["replicate=two is not a whole number"]),
    ("replicate=2,replicate=2", 2, ["'replicate' is given twice"]),
    ("replicate=0", 2, ["replicate=0", "at least 1"]),
    ("replicate=2,zero=2", 2, ["zero=2", "write shard=2,zero=2"]),
    ("shard=2,zero=0", 2, ["shard=2 with zero=0", "write replicate=2"]),
    ("shard=2,zero=4", 2, ["zero=4", "0, 1, 2 or 3"]),
    ("replicate=1,microbatches=0", 1, ["microbatches=0"]),
    ("replicate=1,microbatches=3", 1, ["batch of 8 rows", "6 or 9 rows"]),
    ("replicate=3", 3, ["batch of 8 rows", "3 readers", "6 or 9 rows"]),
    ("replicate=1,recompute=some", 1, ["recompute=some", "known: full, none, selective"]),
    ("replicate=1,recompute=full:0", 1, ["recompute=full:0"]),
    ("replicate=1,recompute=full:3", 1, ["recompute=full:3", "2 repeated layers"]),
    ("replicate=1,precision=bf61", 1, ["precision=bf61", "did you mean 'bf16'?"]),
    ("replicate=1,compile=yes", 1, ["compile=yes", "compile=true"]),
    ("replicate=1,offload=optimizer", 1, ["offload=optimizer", "CPU", "leave offload out"]),
    ("replicate=1,offload=parameters", 1, ["offload=parameters", "leave offload out"]),
]
FALLBACKS = [
    ("replicate=2", ["'replicate=2' has 2 ranks", "fewer than 2"]),
    ("replicate=1,precision=bf16", ["another precision", "precision=float32"]),
    ("replicate=1,microbatches=3", ["batch of 8 rows", "6 or 9 rows"]),
    ("replicate", ["'replicate' has no value"]),
]
MODELS = [
    (["--model", ""], ["model.name is empty", "a type such as llama"]),
    (["--model", "llama", "--model.overrides", "attention_dropout", "2"], ["attention_dropout = 2", "from 0 to 1"]),
    (["--model.overrides", "attn_pdrop", "-0.5"], ["attn_pdrop = -0.5", "from 0 to 1", "model.dropout"]),
    (["--model", "llama", "--model.overrides", "hidden_act", "zzz"], ["KeyError: 'zzz'"]),
    (["--model", "gpt3"], ["model.name = 'gpt3'", "no directory, function or model type; did you mean"]),
    (["--model", "./nowhere"], ["./nowhere", "no such directory"]),
    (["--model", "tests.nowhere:build"], ["tests.nowhere:build", "can't import"]),
    (["--model", "tests.plain_model:bild"], ["no function 'bild'", "did you mean 'build'?"]),
    (["--model.vocab", "7"], ["vocabulary", "larger than the model's 7", "model.vocab"]),
    (["--model.experts", "2"], ["experts"]),
]


@pytest.mark.parametrize(("flags", "told"), FLAGS, ids=lambda value: " ".join(value)[:30])
def test_flags(flags: list[str], told: list[str], root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(root, capsys, *flags)
    assert all(part in message for part in told), message


@pytest.mark.parametrize(("flags", "told"), [*IDLE, *SCHEDULERS], ids=lambda value: " ".join(value)[:30])
def test_settings_without_effect(
    flags: list[str], told: list[str], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(root, capsys, *flags)
    assert all(part in message for part in told), message


def test_a_recipe_s_setting_that_a_flag_takes_the_effect_from_is_left_out_aloud(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = root / "decaying.toml"
    recipe.write_text('[schedule]\nshape = "wsd"\ndecay_share = 0.4\nfloor = 0.0\n')
    argv = ["--schedule.shape", "cosine"]
    config = read_config(RunConfig, [str(recipe), *argv], "train")
    assert config.schedule == ScheduleConfig(shape="cosine", floor=0.0)
    assert "schedule.decay_share = 0.4 of the recipe has no effect" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"schedule.decay_share = 0.5"):
        read_config(RunConfig, [str(recipe), *argv, "--schedule.decay-share", "0.5"], "train")
    recipe.write_text("[schedule]\ndecay_share = 0.4\n")
    with pytest.raises(ConfigError, match=r"schedule.decay_share = 0.4"):
        read_config(RunConfig, [str(recipe), "--schedule.warmup", "3"], "train")


def test_a_run_that_began_with_a_setting_without_effect_goes_on_without_it() -> None:
    idle = RunConfig(schedule=ScheduleConfig(decay_share=0.4))
    assert differences(idle, RunConfig()) == []
    assert differences(RunConfig(schedule=ScheduleConfig(shape="wsd", decay_share=0.4)), RunConfig()) != []


@pytest.mark.parametrize(("flags", "told"), RANKS, ids=lambda value: " ".join(value)[:40])
def test_ranks_that_there_are_not(
    flags: list[str], told: list[str], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(root, capsys, *flags, layout="replicate=2", devices=2)
    assert all(part in message for part in told), message


@pytest.mark.parametrize("form", ["{}", "file://{}", "{}/below", "file://{}/below"])
def test_a_mirror_that_is_a_file(form: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "letter").write_text("dear")
    message = refused(root, capsys, "--checkpoint.mirror", form.format(root / "letter"))
    assert f"{root / 'letter'} is a file" in message and "another path" in message


@pytest.mark.parametrize(("layout", "devices", "told"), LAYOUTS, ids=lambda value: str(value)[:30])
def test_layouts(layout: str, devices: int, told: list[str], root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(root, capsys, layout=layout, devices=devices)
    assert all(part in message for part in told), message


@pytest.mark.parametrize(("layouts", "told"), FALLBACKS)
def test_layouts_of_recovery(layouts: str, told: list[str], root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(root, capsys, "--recovery.layouts", layouts, layout="replicate=2", devices=2)
    assert all(part in message for part in told), message


@pytest.mark.parametrize(("flags", "told"), MODELS, ids=lambda value: " ".join(value)[:30])
def test_models(flags: list[str], told: list[str], root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(root, capsys, *flags)
    assert all(part in message for part in told), message


def test_an_own_model_that_cannot_do_it_is_refused_before_the_text_is_prepared(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Preparing takes hours of a large text: what the model alone decides is said first."""
    texts, cache = root / "several", root / "not-prepared"
    texts.mkdir()
    for seed in range(3):
        write_corpus(texts / f"{seed}.txt", 60, seed)
    flags = ("--data", str(texts), "--data.cache", str(cache), "--model.layers", "None", "--model.width", "None")
    for name, told in (
        ("tests.plain_model:build", "its forward takes no position_ids; set data.mask_documents = false"),
        ("tests.plain_model:bild", "did you mean 'build'?"),
    ):
        message = refused(root, capsys, *flags, "--model", name)
        assert told in message
        assert not cache.exists()


def test_text_that_cannot_be_read(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such file" in refused(root, capsys, "--data", str(root / "nowhere.txt"))
    (root / "empty.txt").write_text("")
    assert "empty.txt" in refused(root, capsys, "--data", str(root / "empty.txt"))
    (root / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 40)
    message = refused(root, capsys, "--data", str(root / "latin.txt"))
    assert "UTF-8" in message and "latin.txt" in message
    (root / "short.txt").write_text("abc")
    assert "a row of sequence 16 needs 17" in refused(root, capsys, "--data", str(root / "short.txt"))


def test_a_truncated_token_file(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = root / "damaged"
    argv = ["prepare", str(root / "corpus.txt"), "--tokenizer", "chars", "--cache", str(cache), "--workers", "1"]
    assert main(argv) == 0
    (file,) = cache.glob("*/train*.bin")
    file.write_bytes(file.read_bytes()[:-10])
    message = refused(root, capsys, "--data.cache", str(cache))
    assert str(file.name) in message
    shutil.rmtree(cache)


def test_a_recipe(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = root / "recipe.toml"
    cases = {
        "[train]\nstep = 3": ["unknown key 'train.step'", "did you mean 'steps'?"],
        "[trian]\nsteps = 3": ["unknown key 'trian'", "did you mean 'train'?"],
        "[train]\nsteps = '3'": ["train.steps = '3'", "must be int"],
        "[monitor]\ndisplay = 'loud'": ["monitor.display = 'loud'", "'plain'"],
        "[train\n": ["not valid TOML"],
    }
    for text, told in cases.items():
        recipe.write_text(text)
        assert main(["train", str(recipe), *words(root, "refused")[1:]]) == 2
        message = capsys.readouterr().err
        assert all(part in message for part in told), message
    assert main(["train", str(root / "nowhere.toml")]) == 2
    assert "no such recipe" in capsys.readouterr().err
    assert not (root / "refused").exists()


def test_a_directory_that_is_no_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = root / "other"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    assert main(words(root, "other")) == 2
    assert "holds files but no config.toml" in capsys.readouterr().err
    assert [path.name for path in other.iterdir()] == ["letter.txt"]
    for argv in (["generate", str(other), "--prompt", "x"], ["export", str(other), "--to", str(root / "x")]):
        assert main(argv) == 2
        assert str(other) in capsys.readouterr().err


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_is_no_run(below: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "letter").write_text("dear")
    assert main(words(root, str(Path("letter") / below))) == 2
    message = capsys.readouterr().err
    assert "letter is a file" in message and "give another --run" in message and "Traceback" not in message
    for argv in (["generate", str(root / "letter"), "--prompt", "x"], ["export", str(root / "letter"), "--to", "x"]):
        assert main(argv) == 2
        assert "letter" in capsys.readouterr().err
    assert main(["train", str(root / "letter" / "recipe.toml")]) == 2
    assert "no such recipe" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "plan.json", "report.html", "checkpoints"])
def test_an_entry_of_another_kind_in_a_run_directory(name: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = root / f"odd-{name}"
    run.mkdir()
    (run / "config.toml").write_text("")
    (run / name).mkdir() if "." in name else (run / name).write_text("dear")
    assert main(words(root, run.name)) == 2
    message = capsys.readouterr().err
    assert f"{name} is a {'folder' if '.' in name else 'file'}" in message and "move it away" in message
    assert not (run / "owner").exists()


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "unknown command 'trian'; did you mean 'train'?" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert main(["generate"]) == 2
    assert "needs RUN|DIR" in capsys.readouterr().err
