"""Help of the verbs: a page that fits a screen, and with ``--help-all`` every setting by section."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from meshwright.cli.arguments import print_result, print_settings
from meshwright.cli.export import ExportConfig
from meshwright.cli.generate import GenerateConfig
from meshwright.cli.help_page import JSON, HelpPage, format_row
from meshwright.cli.run_help import RUN_PAGES
from meshwright.jobs.prepare_engines import PrepareConfig
from meshwright.jobs.requests import CalibrateConfig, InspectConfig, LoopConfig, PlanConfig, VerifyConfig
from meshwright.train.run_config import RunConfig

NODES = (
    ("--hostfile FILE", "every host of it over ssh, a 'host slots=8' a line"),
    ("--nodes N --node I", "number of nodes, and this one's from 0, a command on each; with them"),
    ("  --meet HOST:PORT", "address of node 0; --slots S ranks here, --key-file FILE the run's key"),
)
_RECIPE = ("RECIPE.toml", "settings from a file, first of all; flags go over it (meshwright new writes one)")
PAGES = RUN_PAGES | {
    "train": HelpPage(
        usage="train [RECIPE.toml] [--SETTING VALUE ...]",
        purpose="Prepares text, plans, proves, trains, evaluates, checkpoints; the same command goes on after a stop.",
        options=(
            _RECIPE,
            ("--on LAUNCHER", "slurm, kubernetes, ray: train there; --slurm.nodes N and so on (docs/clusters.md)"),
            *NODES,
            ("--dry-run", "print the commands that would start, and start nothing"),
            JSON,
        ),
        settings=(
            ("--model NAME", "a Hugging Face type (llama, gpt2, qwen3), its directory, or module:function"),
            ("--model.layers N", "blocks; --model.width and --model.heads set the other sizes"),
            ("--data PATH ...", "txt, jsonl, parquet, .gz, .zst; directories and globs"),
            ("--data.sequence N", "tokens of a row"),
            ("--train.steps N", "optimizer steps; --train.epochs X for passes over the text"),
            ("--train.batch N", "rows of a global batch"),
            ("--optimizer.lr X", "peak learning rate"),
            ("--layout LAYOUT", "shard=2,zero=3 and so on; the planner's choice when not given"),
            ("--devices N", "ranks; all GPUs, else all cores"),
            ("--run DIR", "the run's directory; behind torchrun write --run-dir, since --run is its own"),
            ("--checkpoint.every N", "steps between checkpoints"),
            ("--evaluation.every N", "steps between validations"),
        ),
        examples=(
            "meshwright train --model llama --data my-text.txt --train.steps 1000",
            "meshwright train recipes/first.toml --layout shard=2,zero=3 --run runs/first",
            "torchrun --nproc-per-node 8 -m meshwright train recipe.toml --run-dir runs/first",
        ),
        status="0 finished, 1 failed or interrupted (with a checkpoint), 2 refused, 130 second Ctrl-C, 143 SIGTERM.",
        configs=(RunConfig,),
    ),
    "run": HelpPage(
        usage="run RECIPE.toml [--SETTING VALUE ...]",
        purpose="Prepares, plans, verifies, trains, evaluates and exports what a recipe says; leaves out what is done.",
        options=(
            ("RECIPE.toml", "settings from a file; flags go over it (meshwright new writes one)"),
            ("--export TYPE", "of the exported weights: as-trained, float32, bfloat16, float16; or --no-export"),
            ("--sweep KEY=A,B", "a run for each value, and one table; several --sweep combine"),
            *NODES[1:],
            JSON,
        ),
        settings=(
            ("--run DIR", "the run's directory; runs/ and the recipe's name when not given"),
            ("--layout LAYOUT", "shard=2,zero=3 and so on; the planner's choice when not given"),
            ("--devices N", "ranks; all GPUs, else all cores"),
            ("--train.steps N", "optimizer steps"),
            ("--optimizer.lr X", "peak learning rate"),
        ),
        examples=(
            "meshwright run recipes/first.toml --run runs/first",
            "meshwright run recipes/first.toml --sweep optimizer.lr=1e-3,3e-3",
        ),
        status="0 all stages are done, 1 failed or interrupted, 2 refused, 143 SIGTERM.",
        configs=(RunConfig,),
    ),
    "plan": HelpPage(
        usage="plan [RECIPE.toml] [--SETTING VALUE ...]",
        purpose="Chooses the fastest layout that fits some machines, says what it takes and why the others lose.",
        options=(
            (_RECIPE[0], "settings of plan from a file; flags go over it"),
            JSON,
            ("--serve [PORT]", "the planner as a page on this machine, until Ctrl-C; begins with these settings"),
        ),
        settings=(
            ("--model NAME", "llama-3-70b, a Hugging Face type, a directory or config.json, or module:function"),
            ("--sizes TEXT", "layers=32,width=4096,heads=32,vocab=32000 instead of a model"),
            ("--cluster TEXT", "64xh100, 2x8xh100@ethernet-25g, or a cluster's file; several with --tokens"),
            ("--batch N", "rows of a global batch"),
            ("--sequence N", "tokens of a row"),
            ("--precision P", "bf16, float32 and so on"),
            ("--layout LAYOUT ...", "price these layouts beside the best"),
            ("--fix TEXT", "pp=2,tp=8: search with these choices alone"),
            ("--show N", "layouts to list"),
            ("--html FILE", "write the plan as a page"),
            ("--devices 8..512", "a plan for each doubling, and the knee; by --objective cost the cheapest"),
            ("--tokens N --days D", "days, device hours, dollars, kWh of so many tokens; the cheapest within D days"),
            ("--largest, --longest", "the largest model of the family, the longest rows that fit"),
            ("--batch auto", "throughput by batch, and its knee"),
            ("--what-if TEXT", "nic=2x,memory=1.5x,flops=2x,bandwidth=2x: the same on a changed cluster"),
            ("--measured-s S", "with one --layout: its MFU at S seconds a step, and where it loses"),
            ("--walls, --reshape", "what bounds the plan; nearby sizes that use the devices better"),
            ("--emit NAME", "the plan as flags of torchtitan or megatron, or as a config of deepspeed"),
        ),
        examples=(
            "meshwright plan --sizes layers=32,width=4096,heads=32,vocab=32000 --cluster 64xh100 --batch 512",
            "meshwright plan --model llama --model.layers 8 --cluster 8xh100 --json",
        ),
        status="0 something fits, 1 failed, 2 nothing fits or refused.",
        configs=(PlanConfig,),
    ),
    "verify": HelpPage(
        usage="verify [RUN|RECIPE.toml] [--SETTING VALUE ...]",
        purpose="Proves that layouts compute what one device computes: of a model, a whole job, or a custom loop.",
        options=(
            ("RUN|RECIPE.toml", "a job: text, steps, checkpoint, resumption (meshwright verify RUN --help)"),
            ("--loop FILE:FUNCTION", "a custom loop"),
            JSON,
        ),
        settings=(
            ("--model NAME", "a Hugging Face type, its directory, or module:function"),
            ("--layout LAYOUT ...", "layouts to prove; a choice of all axes when not given"),
            ("--devices N", "ranks of the layouts that are chosen"),
            ("--steps N", "optimizer steps"),
            ("--dtype TYPE", "float64 proves; float32, bf16, fp16 are held to a bound of rounding"),
            ("--full", "the model as it is instead of a small clone"),
            ("--timeout-s S", "limit of a layout"),
        ),
        examples=(
            "meshwright verify --model gpt2 --layout shard=2,zero=3 tp=2",
            "meshwright verify runs/first",
        ),
        status="0 every layout equals one device, 1 one doesn't, 2 one was refused and none failed.",
        configs=(VerifyConfig, LoopConfig),
    ),
    "inspect": HelpPage(
        usage="inspect MODEL [--SETTING VALUE ...]",
        purpose="Prints what a model is made of, how each axis can split it, and what a layout's ranks would hold.",
        options=(("MODEL", "a Hugging Face type, its directory, or module:function"), JSON),
        settings=(
            ("--layout LAYOUT ...", "what the ranks of these layouts would hold"),
            ("--explain LAYER", "the evidence for each decision on a layer's weights"),
            ("--stack MODULE", "what a call of a module goes through"),
            ("--rank N", "for this rank"),
        ),
        examples=("meshwright inspect llama --layout tp=2", "meshwright inspect gpt2 --explain transformer.h.0"),
        status="0, or 2 for a model or layout that can't be.",
        configs=(InspectConfig,),
    ),
    "prepare": HelpPage(
        usage="prepare [PATH ...] [--to DIR] [--SETTING VALUE ...]",
        purpose="Turns text into token files, once; train does so by itself.",
        options=(("PATH ...", "files, directories, globs, URLs"), ("--to DIR", "where they are written"), JSON),
        settings=(
            ("--tokenizer NAME", "auto, bpe, chars, a directory, a tokenizer.json or a hub name"),
            ("--vocab-size N", "of a tokenizer that is trained"),
            ("--sequence N", "tokens of a row"),
            ("--validation-share X", "share of the text that is held out"),
            ("--limit-bytes N", "read no more text than this"),
            ("--filters.quality R ...", "rules: gopher-quality, gopher-repetition, c4, fineweb"),
            ("--filters.near-duplicates", "drop documents nearly equal to an earlier one"),
            ("--workers N", "processes"),
            ("--engine NAME", "what runs the tasks: own, local (datatrove), slurm, ray"),
        ),
        examples=(
            "meshwright prepare my-text/*.jsonl.gz --to prepared/mine",
            "meshwright prepare s3://bucket/text/ --engine slurm --slurm.jobs 200 --slurm.time 4:00:00",
        ),
        status="0, 1 failed, 2 refused.",
        configs=(PrepareConfig,),
    ),
    "generate": HelpPage(
        usage="generate RUN|DIR --prompt TEXT [--chat] [--trust]",
        purpose="Continues a prompt with a trained model.",
        options=(
            ("RUN|DIR", "a run's directory, or a model's in Hugging Face format"),
            ("--chat", "say TEXT as a user does, by the tokenizer's chat template, and print the answer"),
            ("--trust", "run the code that the run's config names"),
            JSON,
        ),
        settings=(
            ("--prompt TEXT", "text to go on from"),
            ("--max-tokens N", "tokens to add"),
            ("--temperature X", "divides the logits; 0 takes the likeliest token"),
            ("--top-k N", "draw from the k likeliest tokens"),
            ("--seed N", "of the draws"),
        ),
        examples=('meshwright generate runs/first --prompt "def "',),
        status="0, 1 failed, 2 refused.",
        configs=(GenerateConfig,),
    ),
    "calibrate": HelpPage(
        usage="calibrate [--SETTING VALUE ...]",
        purpose="Measures this machine: products, attention, memory, collectives; plans for it rest on that.",
        options=(*NODES[1:], JSON),
        settings=(
            ("--devices N", "ranks; all devices when not given"),
            ("--quick", "a few seconds instead of a minute"),
            ("--out FILE", "where it is written; the user's cache when not given"),
            ("--practice N", "short runs of a small model for each axis"),
        ),
        examples=("meshwright calibrate", "meshwright calibrate --nodes 2 --node 0 --meet 10.0.0.1:29500"),
        status="0, 1 failed, 2 refused.",
        configs=(CalibrateConfig,),
    ),
    "export": HelpPage(
        usage="export RUN --to DIR [--trust]",
        purpose="Writes a run's model in Hugging Face format.",
        options=(
            ("RUN", "a run's directory; its newest checkpoint that is whole"),
            ("--trust", "run the code that the run's config names"),
            JSON,
        ),
        settings=(("--to DIR", "directory to make"), ("--dtype TYPE", "float32, bfloat16, float16 or as-trained")),
        examples=("meshwright export runs/first --to exported",),
        status="0, 1 failed, 2 refused.",
        configs=(ExportConfig,),
    ),
}
"""The page of each verb; doctor, chaos, new, runs and completion print one of their own."""


def show_help(verb: str) -> None:
    """Prints the page of a verb."""
    print_result("\n".join(PAGES[verb].basic_lines(verb)))


def show_all(verb: str) -> None:
    """Prints every flag of a verb: its own first, then every setting by section."""
    page = PAGES[verb]
    print_result(f"usage: meshwright {page.usage}\n\n{page.purpose}\n\ncommand:")
    print_result("\n".join(map(format_row, page.options)))
    for config in page.configs:
        print_result("")
        with contextlib.suppress(SystemExit):
            print_settings(config, verb)


def wants_help(verb: str, args: Sequence[str]) -> str:
    """Returns ``basic`` or ``all`` where the page of a verb answers a command, else an empty text."""
    if verb not in PAGES:
        return ""
    if "--help-all" in args:
        return "all"
    # A job's proof and a loop's have a page of their own.
    special = verb == "verify" and bool(args) and (not args[0].startswith("-") or "--loop" in args)
    return "basic" if {"-h", "--help"} & set(args) and not special else ""
