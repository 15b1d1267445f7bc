"""Files of other frameworks become recipes: what they say is what is trained, and no key is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.errors import ConfigError, PlanError
from meshwright.jobs.migrate.foreign import UNKNOWN, Foreign
from meshwright.jobs.migrate.recipe import MOST_BYTES, READERS, MigratedRecipe, migrate
from meshwright.jobs.plan_model import model_of_sizes, question_of
from meshwright.jobs.requests import PlanConfig
from meshwright.models.family import family_config
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.choose import choose
from meshwright.planner.emit import emit_plan, narrowed_question
from meshwright.spec.layout import Layout
from tests.house.source import ROOT

DENSE = "layers=8,width=1024,heads=16,kv_heads=4,vocab=32000,ffn=2816"
EXPERTS = "layers=8,width=1024,heads=16,kv_heads=4,vocab=32000,experts=8,active_experts=2,expert_ffn=1408"
SUFFIX = {"deepspeed": ".json", "torchtitan": ".txt", "megatron": ".txt"}
# Written for this test, in the form of the files that people publish.
DEEPSPEED = """{
  "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
  "gradient_clipping": 0.5, "bf16": {"enabled": true}, "wall_clock_breakdown": false,
  "zero_optimization": {"stage": 3, "overlap_comm": true, "reduce_bucket_size": 2e8,
                        "offload_optimizer": {"device": "cpu", "pin_memory": true},
                        "offload_param": {"device": "none"}},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.98], "eps": 1e-7, "weight_decay": 0.05}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 20,
                                                    "total_num_steps": 900}}
}"""
ACCELERATE = """
distributed_type: FSDP
mixed_precision: 'bf16'
num_machines: 2
num_processes: 8
machine_rank: 0
gradient_accumulation_steps: 2
dynamo_config: {dynamo_backend: INDUCTOR}
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_activation_checkpointing: true
  fsdp_offload_params: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""
TORCHTITAN = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 30
decay_ratio = 0.25
[training]
local_batch_size = 4
global_batch_size = 64
seq_len = 4096
max_norm = 2.0
steps = 500
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_layers_per_stage = 8
[activation_checkpoint]
mode = "selective"
"""
MEGATRON = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8; NODES=${NNODES:-2}
TP=2   # inside a node
BATCH=$((4 * TP * 8))
DATA=$3
touch RAN; echo $(touch RAN)
LAUNCH=(--nproc_per_node $GPUS --nnodes $NODES --node_rank ${RANK:-0})
MODEL=(
    --num-layers 4
    --hidden-size 256 --num-attention-heads 4
    # --num-attention-heads 8
    --group-query-attention --num-query-groups 2
    --ffn-hidden-size 512 --seq-length 128 --max-position-embeddings 128
    --swiglu --normalization RMSNorm --rotary-base 500000
    --untie-embeddings-and-output-weights
)
TRAINING="--micro-batch-size 2 --global-batch-size $BATCH --train-samples 6400 \\
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --bf16"
PARALLEL=(--tensor-model-parallel-size $TP --sequence-parallel)
PARALLEL+=(--use-distributed-optimizer)
if [ "$DEBUG" = 1 ]; then
    PARALLEL+=(--fp8-format hybrid)
fi
torchrun ${LAUNCH[@]} pretrain_gpt.py "${MODEL[@]}" $TRAINING \\
    ${PARALLEL[@]} --data-path $DATA --rampup-batch-size 16 16 1000
"""


def migrated(tmp_path: Path, suffix: str, text: str, devices: int | None = None) -> MigratedRecipe:
    path = tmp_path / f"theirs{suffix}"
    path.write_text(text, encoding="utf-8")
    return migrate(path, devices)


@pytest.mark.parametrize(
    ("framework", "layout", "sizes"),
    [
        ("deepspeed", "replicate=8,microbatches=2", DENSE),
        ("deepspeed", "shard=8,zero=1", DENSE),
        ("deepspeed", "replicate=2,shard=8,zero=3,microbatches=2", DENSE),
        ("deepspeed", "shard=16,zero=3,microbatches=2,offload=parameters", DENSE),
        ("deepspeed", "shard=4,tp=2,ep=4,zero=1", EXPERTS),
        ("deepspeed", "shard=8,tp=2,zero=2,microbatches=4,offload=optimizer", DENSE),
        ("deepspeed", "shard=8,zero=3,secondary=2,precision=fp16", DENSE),
        ("deepspeed", "shard=8,ep=4,zero=1", EXPERTS),
        ("torchtitan", "pp=2,shard=4,tp=2,zero=3,microbatches=8,sequence=true,recompute=full", DENSE),
        ("torchtitan", "pp=2,replicate=2,shard=2,zero=2,microbatches=4,schedule=interleaved", DENSE),
        ("torchtitan", "replicate=4,microbatches=4,precision=float32,compile=true", DENSE),
        ("torchtitan", "shard=2,cp=2,zero=3,offload=parameters,attention=gather", DENSE),
        ("torchtitan", "shard=8,ep=4,zero=3", EXPERTS),
        ("megatron", "pp=2,replicate=2,shard=2,tp=2,zero=1,microbatches=4,schedule=interleaved,stages=2", DENSE),
        ("megatron", "pp=3,microbatches=4", DENSE),
        ("megatron", "pp=2,shard=2,zero=3,microbatches=4,recompute=full:4,sequence=true,tp=2", DENSE),
        ("megatron", "cp=8,attention=gather,precision=fp16,offload=optimizer", DENSE),
        ("megatron", "cp=4,attention=heads,recompute=full", DENSE),
        ("megatron", "cp=4,attention=ring,precision=fp8", DENSE),
        ("megatron", "shard=8,ep=4,zero=3", EXPERTS),
    ],
)
def test_a_layout_that_was_written_is_read_back(framework: str, layout: str, sizes: str, tmp_path: Path) -> None:
    """Unless a stage split was left to the planner, which the other framework is told in layers."""
    wanted = Layout.parse(layout if "precision" in layout else f"{layout},precision=bf16")
    config = PlanConfig(sizes=sizes, cluster=f"{wanted.world}xh100", batch=64, sequence=1024)
    question = question_of(config, model_of_sizes(sizes))
    text = emit_plan(framework, question, [price_candidate(question, wanted)]).text
    text += "\n--num-layers 8" if framework == "megatron" else ""
    recipe = migrated(tmp_path, SUFFIX[framework], text, None if framework == "deepspeed" else wanted.world)
    expected = Layout.parse(f"{wanted},split=3-3-2" if layout.startswith("pp=3") else str(wanted))
    assert recipe.layout == expected
    assert (recipe.config.train.batch, recipe.config.devices) == (64, wanted.world)


@pytest.mark.parametrize("framework", ["deepspeed", "torchtitan", "megatron"])
def test_the_planners_own_layouts_are_read_back(framework: str, tmp_path: Path) -> None:
    config = PlanConfig(sizes=DENSE, cluster="16xh100", batch=64, sequence=1024)
    question = narrowed_question(framework, question_of(config, model_of_sizes(DENSE)))
    seen = 0
    for candidate in choose(question).shown:
        try:
            emitted = emit_plan(framework, question, [candidate])
        except PlanError:  # the framework has no such layout, which its own test is about
            continue
        recipe = migrated(tmp_path, SUFFIX[framework], emitted.text + "\n", candidate.layout.world)
        for name in ("degrees", "zero", "microbatches", "precision", "offload"):
            assert getattr(recipe.layout, name) == getattr(candidate.layout, name), (str(candidate.layout), name)
        seen += 1
    assert seen >= 3


def test_deepspeeds_configuration_is_a_recipe(tmp_path: Path) -> None:
    recipe = migrated(tmp_path, ".json", DEEPSPEED)
    # 64 rows of micro-batches of 2 rows, 4 of them on each rank: 8 ranks.
    assert str(recipe.layout) == "shard=8,zero=3,microbatches=4,precision=bf16,offload=optimizer"
    config = recipe.config
    assert (config.devices, config.train.batch, config.train.steps) == (8, 64, 900)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps) == (3e-5, 0.9, 0.98, 1e-7)
    assert (optimizer.weight_decay, optimizer.clip) == (0.05, 0.5)
    assert (config.schedule.shape, config.schedule.warmup, config.schedule.floor) == ("linear", 20, 0.0)
    assert [line.partition(":")[0] for line in recipe.missing] == ["scheduler.type = WarmupDecayLR"]  # its log warm-up
    assert any(line.startswith("optimizer.params.lr = 2e-05: the schedule's peak") for line in recipe.needless)


def test_accelerates_file_is_a_recipe(tmp_path: Path) -> None:
    recipe = migrated(tmp_path, ".yaml", ACCELERATE)
    assert recipe.layout == Layout.parse(
        "replicate=2,shard=4,zero=3,microbatches=2,recompute=full,precision=bf16,compile=true"
    )
    assert recipe.config.train.batch == 16 and not recipe.missing
    hybrid = ACCELERATE.replace("fsdp_config:", "parallelism_config: {parallelism_config_tp_size: 2}\nfsdp_config:")
    assert recipe.layout.degree("tp") == 1 and migrated(tmp_path, ".yaml", hybrid).layout.degree("tp") == 2
    kind = "distributed_type: DEEPSPEED\nnum_processes: 4\nmixed_precision: fp16\ndeepspeed_config:\n"
    stage = "  zero_stage: 2\n  offload_optimizer_device: cpu\n  gradient_clipping: 0.7\n"
    offloaded = migrated(tmp_path, ".yaml", kind + stage)
    assert str(offloaded.layout) == "shard=4,zero=2,precision=fp16,offload=optimizer"
    assert offloaded.config.optimizer.clip == 0.7


def test_torchtitans_file_is_a_recipe(tmp_path: Path) -> None:
    recipe = migrated(tmp_path, ".toml", TORCHTITAN, 16)
    # 64 rows over 4 readers of 4 rows are 4 accumulations, each of 4 micro-batches; with pp FSDP keeps weights.
    assert recipe.layout == Layout.parse(
        "pp=2,shard=4,tp=2,zero=2,microbatches=16,recompute=selective,precision=bf16,schedule=interleaved,stages=2,"
        "sequence=true"
    )
    config = recipe.config
    assert (config.model.layers, config.model.width, config.model.kv_heads, config.model.vocab) == (32, 4096, 8, 128256)
    assert (config.data.sequence, config.train.batch, config.train.steps, config.optimizer.clip) == (4096, 64, 500, 2.0)
    assert (config.schedule.shape, config.schedule.decay_share, config.schedule.warmup) == ("wsd", 0.25, 30)
    assert config.optimizer.decay == "all"  # torchtitan's optimizer decays norms too


def test_megatrons_script_is_read_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = migrated(tmp_path, ".sh", MEGATRON)
    assert not (tmp_path / "RAN").exists()
    # 16 devices: 8 readers of 2 rows, 64 rows are 4 micro-batches.
    assert str(recipe.layout) == "shard=8,tp=2,zero=1,microbatches=4,precision=bf16,sequence=true"
    config = recipe.config
    assert (config.devices, config.train.batch, config.train.steps) == (16, 64, 100)
    assert (config.schedule.warmup, config.schedule.floor, config.optimizer.lr) == (10, 0.1, 1e-3)
    model = family_config(config.model, vocab=100, context=None)
    assert (model.num_hidden_layers, model.num_attention_heads, model.num_key_value_heads) == (4, 4, 2)
    assert (model.intermediate_size, model.rope_parameters["rope_theta"], model.tie_word_embeddings) == (
        (512, 500000, False)
    )
    missing = "\n".join(recipe.missing)
    assert "--fp8-format hybrid: under a condition of the script" in missing
    assert "data-path = $3: write paths" in missing and "rampup-batch-size = 16 16 1000: " in missing


def test_flags_of_a_variable_that_only_a_condition_sets_are_undecided(tmp_path: Path) -> None:
    text = 'if [ "$DEBUG" = 1 ]; then\n  EXTRA=(--fp8-format hybrid)\nfi\n'
    text += "torchrun --nproc_per_node 4 pretrain_gpt.py ${EXTRA[@]} --micro-batch-size 1 --bf16\n"
    recipe = migrated(tmp_path, ".sh", text)
    assert any(line.startswith("--fp8-format hybrid: under a condition of the script") for line in recipe.missing)
    assert 'precision = "bf16"' in recipe.text or "precision=bf16" in recipe.text


def keys_of(foreign: Foreign) -> list[str]:
    tables = (foreign.settings, foreign.needless, foreign.missing, foreign.layout_keys)
    return [key.replace("*", "x") for table in tables for key in table]


@pytest.mark.parametrize("framework", READERS)
def test_no_key_is_lost(framework: str, tmp_path: Path) -> None:
    """Each key alone, on and off, and one that nobody knows: the recipe names it, or the file is refused."""
    foreign = READERS[framework][0]
    base = {
        "deepspeed": {"train_micro_batch_size_per_gpu": 1},
        "accelerate": {"num_processes": 4},
        "torchtitan": {"parallelism.data_parallel_shard_degree": 4},
        "megatron": {"micro-batch-size": 1, "tensor-model-parallel-size": 1},
        "trl": {"per_device_train_batch_size": 1},
    }[framework]
    named = 0
    for key in [*keys_of(foreign), "nobody.knows.this"]:
        for value in (True, False, 2, "2"):
            keys = {**base, key: value}
            if framework in ("torchtitan", "megatron"):
                text = "".join(f"--{name} {str(item).lower()}\n" for name, item in keys.items())
                suffix = ".txt"
            else:
                nested: dict = {}
                for name, item in keys.items():
                    *outer, last = name.split(".")
                    level = nested
                    for part in outer:
                        level = level.setdefault(part, {})
                    level[last] = item
                text, suffix = (
                    json.dumps(nested),
                    {"deepspeed": ".json", "accelerate": ".yaml", "trl": ".yml"}[framework],
                )
            try:
                recipe = migrated(tmp_path, suffix, text, 4)
            except ConfigError:
                continue
            assert f"{key} = " in recipe.text, (key, value)
            unknown = [line for line in recipe.missing if line.endswith(UNKNOWN)]
            assert unknown or key != "nobody.knows.this", value
            named += 1
    assert named > 2 * len(keys_of(foreign))


@pytest.mark.parametrize(
    ("suffix", "text", "why"),
    [
        (".json", '{"train_batch_size": 8}', "give --devices N"),
        (
            ".json",
            '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {}}',
            "divide by 16",
        ),
        (".json", '{"train_batch_size": 1e999}', "is to be a number"),
        (".json", '{"train_batch_size": "many"}', "is to be a number"),
        (".json", '{"name": "package"}', "none of the keys"),
        (".json", "[1, 2]", "a configuration is a mapping"),
        (".json", '{"train_batch_size": ', "is not valid JSON"),
        (".json", "[" * 5000, "is not valid JSON"),
        (".json", '{"a":' * 9 + "1" + "}" * 9, "nested more than 6 deep"),
        (".json", " " * (MOST_BYTES + 1), "more than 1024 KiB"),
        (".yaml", "distributed_type: !!python/object/apply:os.system ['touch RAN']", "tag, anchor or alias"),
        (".yaml", "distributed_type: &a NO\nnum_processes: *a", "tag, anchor or alias"),
        (".yaml", "distributed_type: XLA\nnum_processes: 4", "isn't trained here"),
        (
            ".yaml",
            "deepspeed_config: {deepspeed_config_file: ds.json}\nnum_processes: 2",
            "--from that file --devices 2",
        ),
        (".toml", "[parallelism]\ntensor_parallel_degree = 3", "4 doesn't divide by 3"),
        (".toml", "[training]\nglobal_batch_size = 10\nlocal_batch_size = 4", "doesn't divide"),
        (".sh", "echo hello", "no command with flags"),
        (".sh", "python a.py --lr 1 --seed 2\npython a.py --lr 2 --seed 2", "commands with different flags"),
        (".sh", "python a.py --lr 'no end --seed 2", "a quote that doesn't end"),
        (".sh", "python a.py --lr 1 --micro-batch-size $1", "only a run of the script knows it"),
        (".sh", "A=aaaaaaaa\n" + "A=$A$A$A$A\n" * 60 + "python a.py --lr $A --seed 1", "more than 65536 characters"),
        (".sh", "A='" + "a " * 9000 + "'\npython a.py --x $A $A $A --lr 1", "more than 20000 words"),
        (".sh", "python a.py --tensor-model-parallel-size 8 --seed 1", "doesn't divide by 8"),
    ],
    ids=range(23),
)
def test_what_cant_be_is_refused(suffix: str, text: str, why: str, tmp_path: Path) -> None:
    devices = None if "give --devices" in why else 4
    with pytest.raises(ConfigError, match=why):
        migrated(tmp_path, suffix, text, devices)
    assert not (tmp_path / "RAN").exists()


def test_a_files_words_stay_in_comments(tmp_path: Path) -> None:
    """A key or value with a line end can't become a setting of the recipe."""
    nasty = 'x\nlayout = "tp=4"\n[optimizer]\nlr = 9.0\r\x85\u2028lr = 9'
    keys = {"train_micro_batch_size_per_gpu": 1, nasty: nasty, "optimizer": {"type": nasty, "params": {nasty: 1}}}
    recipe = migrated(tmp_path, ".json", json.dumps(keys), 4)
    assert str(recipe.layout) == recipe.config.layout == "replicate=4" and recipe.config.optimizer.lr == 1e-3


def test_the_command_writes_a_recipe_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a text")
    for name, text in (("ds.json", DEEPSPEED), ("run.sh", MEGATRON), ("acc.yml", ACCELERATE)):
        Path(name).write_text(text)
        words = ["new", "--from", name, "--to", f"{name}.toml", "--data", "text.txt"]
        assert main([*words, "--model", "gpt2"] if name == "ds.json" else words) == 0
        output = capsys.readouterr()
        assert output.out == f"{name}.toml\n" and "settings, " in output.err
        assert main(["train", f"{name}.toml", "--dry-run"]) == 0
        assert f"meshwright train {name}.toml" in capsys.readouterr().out
    assert main(words) == 2, "a recipe that stands is never overwritten"
    assert main(["new", "--from", "none.json", "--to", "x.toml"]) == 2
    assert main(["new", "--from", "ds.json", "--devices", "many", "--to", "x.toml"]) == 2


def migration_table(foreign: Foreign) -> str:
    """The rows of docs/migrating.md for a framework."""
    rows = {key: f"`{setting}`" for key, setting in foreign.settings.items()} | dict(foreign.layout_keys)
    rows |= {key: f"needless: {why}" for key, why in foreign.needless.items()}
    rows |= {key: f"left out: {why}" for key, why in foreign.missing.items() if key not in rows}
    return "| theirs | here |\n|---|---|\n" + "\n".join(f"| `{key}` | {ours} |" for key, ours in sorted(rows.items()))


@pytest.mark.parametrize("framework", READERS)
def test_the_tables_of_the_docs_are_those_of_the_code(framework: str) -> None:
    assert migration_table(READERS[framework][0]) in (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
