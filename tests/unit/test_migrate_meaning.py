"""Files of other frameworks mean the same in a recipe, also where they are silent; hostile ones are refused."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.errors import ConfigError
from meshwright.jobs.migrate.recipe import MigratedRecipe, migrate
from meshwright.jobs.migrate.shell import read_script
from meshwright.models.build import build_meta

SCRIPT = "python pretrain_gpt.py --lr 1e-3 --micro-batch-size 1 "


def migrated(tmp_path: Path, suffix: str, text: str) -> MigratedRecipe:
    path = tmp_path / f"theirs{suffix}"
    path.write_text(text, encoding="utf-8")
    return migrate(path, 4)


def deepspeed(tmp_path: Path, **keys: object) -> MigratedRecipe:
    return migrated(tmp_path, ".json", json.dumps({"train_micro_batch_size_per_gpu": 1} | keys))


def test_deepspeeds_defaults_hold(tmp_path: Path) -> None:
    """FusedAdam's weight decay is 0; WarmupDecayLR's peak is 0.001 over the optimizer's rate, after 1000 steps."""
    adam = {"type": "AdamW", "params": {"lr": "2e-5"}}
    recipe = deepspeed(tmp_path, optimizer=adam, steps_per_print=50.0)
    config = recipe.config
    assert (config.optimizer.weight_decay, config.optimizer.lr, config.monitor.every) == (0.0, 2e-5, 50)
    assert recipe.missing[0].startswith("scheduler: the file has none")
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000, "warmup_type": "linear"}}
    recipe = deepspeed(tmp_path, optimizer=adam, scheduler=scheduler)
    assert (recipe.config.schedule.warmup, recipe.config.optimizer.lr, recipe.missing) == (1000, 0.001, ())


def test_megatrons_defaults_hold(tmp_path: Path) -> None:
    """Norms of 1e-5, one group of keys, SwiGLU's width, rotary base and auxiliary loss: Hugging Face's differ."""
    sizes = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 "
    recipe = migrated(tmp_path, ".sh", SCRIPT + sizes + "--swiglu --group-query-attention --normalization RMSNorm")
    model = recipe.config.model
    assert (model.kv_heads, model.ffn, model.overrides) == (1, 640, {"rms_norm_eps": 1e-5})
    missing = "\n".join(recipe.missing)
    assert "position-embedding-type: not given, which is learned_absolute there" in missing
    assert "hidden-dropout: not given, which is 0.1 there; llama has no dropout" in missing
    assert "attention-dropout: not given" in missing and "initial weights: " in missing
    none = migrated(tmp_path, ".sh", SCRIPT + sizes + "--swiglu --hidden-dropout 0 --attention-dropout 0.0")
    assert "dropout" not in "\n".join(none.missing)
    assert "disable-bias-linear: not given" in missing and "normalization: not given" not in missing
    rest = "--swiglu --num-experts 4 --num-query-groups 2 --use-rotary-position-embeddings --ffn-hidden-size 512 "
    recipe = migrated(tmp_path, ".sh", SCRIPT + sizes + rest + "--moe-ffn-hidden-size 448")
    overrides = recipe.config.model.overrides
    assert recipe.config.model.ffn == 448 and "no layer of mixtral is without experts" in recipe.text
    assert migrated(tmp_path, ".sh", SCRIPT + sizes + rest).config.model.ffn == 512
    assert recipe.config.model.kv_heads is None and overrides["router_aux_loss_coef"] == 0.0
    assert "10000" in str(overrides["rope_parameters"])
    assert not any(line.startswith("position") for line in recipe.missing)


def test_torchtitans_defaults_hold(tmp_path: Path) -> None:
    recipe = migrated(tmp_path, ".toml", '[model]\nconverters = ["mx"]\n[training]\nlocal_batch_size = 2')
    assert (recipe.config.train.steps, str(recipe.layout.recompute)) == (10000, "selective")
    assert any(line.startswith("model.converters = ['mx']") for line in recipe.missing)
    flags = "--training.local-batch-size 2\n--training.steps 900\n"
    assert migrated(tmp_path, ".txt", flags).config.train.batch == 8


def test_accelerates_words(tmp_path: Path) -> None:
    text = "distributed_type: NO\nmixed_precision: fp4\nnum_processes: 4"
    recipe = migrated(tmp_path, ".yaml", text)
    assert recipe.layout.precision == "float32" and recipe.missing[0].startswith("mixed_precision = fp4")
    both = "{fsdp_version: 2, fsdp_sharding_strategy: FULL_SHARD, fsdp_reshard_after_forward: false}"
    text = f"distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {both}"
    assert migrated(tmp_path, ".yaml", text).layout.zero == 2  # FSDP2 reads the second alone


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        # A comment ends with its line, also before a backslash, and an apostrophe in it is no quote.
        ("A=(\n--lr 1\n# --seed 4 \\\n--swiglu\n)\npython gpt.py ${A[@]} # it's", {"lr": ["1"], "swiglu": []}),
        ('A="\n--lr 1\n--swiglu\n" # it\'s\npython gpt.py $A', {"lr": ["1"], "swiglu": []}),
        ("declare -a A=(--lr 1 --swiglu)\npython gpt.py ${A[@]}", {"lr": ["1"], "swiglu": []}),
        ("cat > x <<'EOF'\nit's --lr 9 --seed 3\nEOF\npython gpt.py --lr 1 --swiglu", {"lr": ["1"], "swiglu": []}),
        ("B=$((1 << N))\npython gpt.py --lr 1 --swiglu", {"lr": ["1"], "swiglu": []}),
        ('echo "with --lr 9 --seed 3"\npython gpt.py --lr 1 --swiglu', {"lr": ["1"], "swiglu": []}),
        ("python gpt.py --lr 1 --spec x.py --seed 3", {"lr": ["1"], "spec": ["x.py"], "seed": ["3"]}),
        ("python gpt.py --lr 1\\\n2 --swiglu", {"lr": ["12"], "swiglu": []}),
        ("X=1\nfor X in 2 3; do\npython gpt.py --lr $X --swiglu\ndone", {"lr": ["$X"], "swiglu": []}),
    ],
)
def test_flags_of_a_script(script: str, flags: dict[str, list[str]]) -> None:
    assert read_script(script).flags == flags


def test_what_only_a_run_knows_is_told(tmp_path: Path) -> None:
    script = "TP=1\nif [ $X ]; then TP=2; UNUSED=3; fi\n" + SCRIPT.replace("--lr", "$MODEL_ARGS --lr")
    recipe = migrated(tmp_path, ".sh", script + "--tensor-model-parallel-size $TP")
    assert "$MODEL_ARGS TP=2: under a condition of the script" in "\n".join(recipe.missing)
    assert "UNUSED" not in recipe.text


@pytest.mark.parametrize(
    ("suffix", "text", "why"),
    [
        (".json", '{"train_batch_size": 1' + "0" * 400 + "}", "is to be a number"),
        (".json", '{"train_batch_size": 4, "gradient_clipping": 1' + "0" * 400 + "}", "too large for a float"),
        (".json", '{"train_batch_size": 4, "train_batch_size": 8}', "train_batch_size stands in it twice"),
        (".json", '{"fp16.enabled": true, "fp16": {"enabled": false}}', "fp16.enabled stands in it twice"),
        (".json", '{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', "only one of them can hold"),
        (".json", '{"optimizer": {"params": {"betas": [null, null]}}}', "takes a number or a word"),
        (".json", '{"optimizer": {"params": {"betas": [0.9]}}}', "they are two numbers"),
        (".json", '{"seed": {}}', "takes a number or a word"),
        (".yaml", "num_processes: 4\nnum_processes: 2", "num_processes stands in it twice"),
        (".yaml", 'distributed_type: "\\e[31mX"', r"distributed_type: \?\[31MX isn't trained"),
        (".yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: WILD}", "strategies are FULL_SHARD"),
        (".toml", "a." * 100000 + "a = 1", "a key of more than 16 parts"),
        (".toml", '[job]\nconfig_file = "x.toml"', "the settings are in x.toml"),
        (".toml", "[training]\ntensor_parallel_degree = 2\n[parallelism]\ntensor_parallel_degree = 4", "one setting"),
        (".sh", SCRIPT + "--bf16 --fp16", "only one of them can hold"),
        (".sh", SCRIPT + '--seed "\x1b[31m$X"', r"--seed \?\[31m\$X"),
        (".sh", "A=" + "a" * 60000 + "\npython a.py --x " + "$A " * 9000 + "--lr 1", "more than 20000 words"),
        (".sh", "A=(a a a)\n" + "A+=(" + "${A[@]} " * 30000 + ")\npython a.py --x $A --lr 1", "more than 20000 words"),
    ],
    ids=range(18),
)
def test_a_hostile_file_is_refused_at_once(suffix: str, text: str, why: str, tmp_path: Path) -> None:
    started_s = time.process_time()
    with pytest.raises(ConfigError, match=why):
        migrated(tmp_path, suffix, text)
    assert time.process_time() - started_s < 5


def test_nothing_of_a_file_steers_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT + "--x '\x1b[31m'\nif $A; then B=(--y '\x1b[31m\u202e'); fi", encoding="utf-8")
    assert main(["new", "--from", str(path), "--devices", "4", "--to", str(tmp_path / "to.toml")]) == 0
    told = capsys.readouterr().err
    for devices in ("0", "²", "1e3"):
        assert main(["new", "--from", str(path), "--devices", devices, "--to", str(tmp_path / "other.toml")]) == 2
    assert "--y ?[31m?: under a condition" in told and "\x1b" not in told + (tmp_path / "to.toml").read_text()


FLAGS = "--num-layers 8 --global-batch-size 64 --micro-batch-size 2 --lr 1e-3 "


@pytest.mark.parametrize(
    ("suffix", "text", "expected"),
    [
        (".sh", FLAGS + "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", "stages=2"),
        (
            ".sh",
            FLAGS + "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block "
            "--recompute-num-layers 4",
            "recompute=full",
        ),
        (".sh", "torchrun --nproc_per_node 8 pretrain_gpt.py " + FLAGS, "replicate=4"),
        (".yaml", "num_processes: 4\ndistributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 2}", "zero=2"),
        (".yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}", "zero=2"),
        (".yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 0}", "replicate=4"),
        (".yaml", "distributed_type: FSDP\nnum_machines: 2\nfsdp_config: {fsdp_sharding_strategy: 4}", "replicate=2"),
        (".json", '{"train_batch_size": 32, "gradient_accumulation_steps": 2}', "microbatches=2"),
        (".json", '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}', "microbatches=4"),
        (".json", '{"zero_optimization": {"stage": 3, "mics_shard_size": 1}}', "replicate=4"),
        (
            ".toml",
            '[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_rotate_method = "alltoall"',
            "attention=ring",
        ),
    ],
    ids=range(11),
)
def test_a_key_is_this_part_of_the_layout(suffix: str, text: str, expected: str, tmp_path: Path) -> None:
    assert expected in str(migrated(tmp_path, suffix, text).layout).split(",")


def test_schedules_keep_their_shape(tmp_path: Path) -> None:
    samples = "--train-samples 64000 --lr-warmup-samples 640"
    assert migrated(tmp_path, ".sh", FLAGS + samples).config.schedule.warmup == 10
    cosine = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": 900}}
    assert deepspeed(tmp_path, scheduler=cosine).config.schedule.floor == 0.0001
    piped = "pipeline_parallel_degree = 2\nnum_pp_microbatches = 3"
    with pytest.raises(ConfigError, match="8 rows don't divide over 6 micro-batches"):
        migrated(tmp_path, ".toml", f"[training]\nlocal_batch_size = 4\n[parallelism]\n{piped}")


def test_torchtitans_flavors_bring_their_blocks(tmp_path: Path) -> None:
    """Bases of rotary positions, their scaling, epsilon and tied heads are other numbers in Hugging Face's defaults."""

    def built(suffix: str, text: str) -> Any:
        recipe = migrated(tmp_path, suffix, text)
        assert any(line.startswith("initial weights: ") for line in recipe.missing)
        return build_meta(dataclasses.replace(recipe.config.model, layers=1)).module.config

    llama = built(".toml", '[model]\nname = "llama3"\nflavor = "8B"')
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert llama.rope_parameters == rope | {"original_max_position_embeddings": 8192}
    assert (llama.rms_norm_eps, llama.tie_word_embeddings) == (1e-5, False)
    assert "model.overrides.rope_parameters: positions are scaled" in "\n".join(
        migrated(tmp_path, ".toml", '[model]\nname = "llama3"\nflavor = "8B"').missing
    )
    qwen = built(".toml", '[model]\nname = "qwen3"\nflavor = "0.6B"')
    assert qwen.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert (qwen.rms_norm_eps, qwen.head_dim, qwen.tie_word_embeddings) == (1e-6, 128, True)
    of_function = built(".txt", "--module qwen3\n--config qwen3_0_6b")
    assert of_function.to_dict() == qwen.to_dict()
    assert not built(".toml", '[model]\nname = "qwen3"\nflavor = "8B"').tie_word_embeddings


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it holds nothing; a configuration is a mapping"):
        migrated(tmp_path, ".yaml", "# all of it is a comment\n")
