# long: setup, contenders, and what is made of their figures belong to one measurement
"""Speed of steps on one GPU: meshwright beside loops by hand, on the same weights and rows; a trace; 8B projected.

A llama of 1.2B (18 layers, D = 2,048, 32 query and 8 key heads, F = 8,192, 32,768 words) on 4 rows of 4,096 tokens,
bf16 compute over float32 weights, fused AdamW, clipping at 1, loss logged. Each contender is a process of its own,
forked from one that has imported everything and touched no GPU. Loops by hand are timed by CUDA events, meshwright by
its ``metrics.jsonl``; medians leave out the first `WARM` steps. Model FLOPs a token: 6 (N - N_embedding) + 12 L D S,
the formula of torchtitan, which counts the whole square of attention and nothing that is recomputed.

    python -m tests.gpu.parts.throughput --out FOLDER [--only ours-compiled,fsdp2-compiled] [--limit-s 170] [--tiny]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.launch.preload import prepare_environment

prepare_environment()
from meshwright.torch_compat.torchao_import import import_before_transformers  # noqa: E402

# Else transformers' import of torchao would touch the GPU, and no process could be forked.
import_before_transformers()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from meshwright.cli.main import main as run_command  # noqa: E402
from meshwright.data.loader import Loader  # noqa: E402
from meshwright.data.tokens import TokenSet  # noqa: E402
from meshwright.spec.layout import Layout  # noqa: E402
from meshwright.train.optimizer import LocalAdamW  # noqa: E402
from tests.gpu import hand_loops  # noqa: E402
from tests.gpu.device_trace import trace_steps  # noqa: E402
from tests.gpu.hand_loops import HandLoop  # noqa: E402
from tests.runs import Running  # noqa: E402

PEAK = 989e12
"""Dense bf16 FLOP/s of an H100 SXM by its data sheet."""
WARM, TIMED, TRACED = 4, 12, 2
CASE_LIMIT_S, CASE_LEAST_S = 80.0, 15.0
"""Seconds after which a contender is ended, and which must be left for it to begin."""
WARM_LIMIT_S, LATE_S, WARM_AT_ONCE, WARM_NICE = 75.0, 8.0, 3, 5
"""Seconds in which the compiler's cache is filled, and in which what runs then must end; its processes, and how nice
they are to others."""
ALIKE, ALIKE_STEPS = 5e-3, 4
"""Relative difference of first losses that rounding to bf16 may make."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A llama and its rows."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    rows: int

    def config(self) -> LlamaConfig:
        """Returns it in transformers' terms."""
        return LlamaConfig(
            hidden_size=self.width, intermediate_size=self.ffn, num_hidden_layers=self.layers, vocab_size=self.vocab,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, max_position_embeddings=self.sequence,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=0, pad_token_id=None,
        )  # fmt: skip

    def layer_weights(self) -> int:
        """Returns the weights of a layer's matrices."""
        head = self.width // self.heads
        return self.width * (2 * self.width + 2 * self.kv_heads * head + 3 * self.ffn)

    def flops_per_token(self, layers: int | None = None) -> float:
        """Returns model FLOPs of a token: 6 (N - N_embedding) + 12 L D S."""
        layers = self.layers if layers is None else layers
        weights = layers * self.layer_weights() + self.vocab * self.width
        return 6.0 * weights + 12.0 * layers * self.width * self.sequence


SHAPES = {
    "1.2b": Shape(layers=18, width=2048, heads=32, kv_heads=8, ffn=8192, vocab=32768, sequence=4096, rows=4),
    "8b": Shape(layers=4, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, sequence=8192, rows=2),
}
TINY = {
    "1.2b": Shape(layers=4, width=64, heads=4, kv_heads=2, ffn=128, vocab=512, sequence=128, rows=4),
    "8b": Shape(layers=4, width=64, heads=4, kv_heads=2, ffn=128, vocab=1024, sequence=128, rows=2),
}
BARS = {"bf16": 6667.0, "fp8": 8532.0}
"""Tokens/s of a GPU: torchtitan, Llama 3 8B on 8 H100, batch 2, S = 8,192, compiled. Source: its performance pages."""
LAYERS_8B, GPUS_8B = 32, 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """A contender, or a run that something is read from."""

    setting: str
    """Those of one setting are compared; empty for none."""
    hand: HandLoop | None = None
    layout: str = ""
    words: tuple[str, ...] = ()
    shape: str = "1.2b"
    layers: int = 0
    """Where it is another number than the shape's."""
    documents: bool = False
    traced: bool = False
    cudnn: bool = False
    """Whether torch's attention takes cuDNN's kernel before its own."""
    without: tuple[str, ...] = ()
    """What is left out of meshwright, by its names in `PARTS`: as it was before."""


HALF = "precision=bf16"
VARLEN = ("--model.attention", "varlen")
LAYERS_8 = f"{HALF},compile=true,recompute=selective"
FP8_8 = "precision=fp8,compile=true,recompute=selective"
CASES = {
    "ours-compiled": Case(setting="compiled", layout=f"{HALF},compile=true", traced=True),
    "ours-documents-varlen": Case(setting="documents", layout=f"{HALF},compile=true", documents=True, words=VARLEN),
    "ours-fp8": Case(setting="fp8", layout="precision=fp8,compile=true"),
    "fsdp2-compiled": Case(setting="compiled", hand=HandLoop(style="fsdp2", compile=True)),
    "ours-eager": Case(setting="eager", layout=HALF),
    "8b-4-bf16": Case(setting="", layout=LAYERS_8, shape="8b"),
    "8b-1-bf16": Case(setting="", layout=LAYERS_8, shape="8b", layers=1),
    "8b-4-fp8": Case(setting="", layout=FP8_8, shape="8b"),
    "8b-1-fp8": Case(setting="", layout=FP8_8, shape="8b", layers=1),
    "plain-compiled": Case(setting="compiled", hand=HandLoop(style="autocast", compile=True)),
    "ours-cudnn": Case(setting="cudnn", layout=f"{HALF},compile=true", cudnn=True),
    "fsdp2-eager": Case(setting="eager", hand=HandLoop(style="fsdp2", compile=False)),
    "fsdp2-fp8": Case(setting="fp8", hand=HandLoop(style="fsdp2", compile=True, float8=True)),
    "ours-documents-mask": Case(setting="documents", layout=f"{HALF},compile=true", documents=True),
    "fsdp2-documents-flex": Case(
        setting="documents",
        documents=True,
        hand=HandLoop(style="fsdp2", compile=True, attention="flex_attention", documents=True),
    ),
    "fsdp2-cudnn": Case(setting="cudnn", hand=HandLoop(style="fsdp2", compile=True), cudnn=True),
    "plain-eager": Case(setting="eager", hand=HandLoop(style="autocast", compile=False)),
    "plain-bf16-compiled": Case(setting="", hand=HandLoop(style="bf16", compile=True)),
    "ours-selective": Case(setting="", layout=f"{HALF},compile=true,recompute=selective"),
    "before-compiled": Case(setting="compiled", layout=f"{HALF},compile=true", without=("copies", "update")),
    "copies-compiled": Case(setting="compiled", layout=f"{HALF},compile=true", without=("update",)),
    "ours-compiled-again": Case(setting="compiled", layout=f"{HALF},compile=true"),
    "before-compiled-again": Case(setting="compiled", layout=f"{HALF},compile=true", without=("copies", "update")),
    "ours-parts": Case(setting="parts", layout=f"{HALF},compile=true,microbatches=4"),
    "before-parts": Case(setting="parts", layout=f"{HALF},compile=true,microbatches=4", without=("copies", "update")),
    "before-fp8": Case(setting="fp8", layout="precision=fp8,compile=true", without=("copies", "update")),
    "before-eager": Case(setting="eager", layout=HALF, without=("copies", "update")),
    "fsdp2-compiled-again": Case(setting="compiled", hand=HandLoop(style="fsdp2", compile=True)),
    "ours-eager-again": Case(setting="eager", layout=HALF),
    "fsdp2-eager-again": Case(setting="eager", hand=HandLoop(style="fsdp2", compile=False)),
    "plain-eager-again": Case(setting="eager", hand=HandLoop(style="autocast", compile=False)),
}
"""By name, in the order in which they run; ``before-...`` is ``ours-...`` without what `PARTS` says."""


def without_copies() -> None:
    """Has FSDP2 cast and copy the weights of one rank."""
    Layout.has_compute_copies = property(lambda _layout: False)  # type: ignore[method-assign, assignment]


def without_update() -> None:
    """Has torch's kernel run AdamW."""
    LocalAdamW._fits_kernels = lambda _optimizer: False  # type: ignore[method-assign]


PARTS = {"copies": without_copies, "update": without_update}
"""What takes a part out of this process and those that it forks, by the part's name."""


class Child(Running):
    """A function in a process of its own, forked from this one."""

    @staticmethod
    def _run(work: Any, output: Path, before: Callable[[], None] | None, begun: int) -> None:
        status = 99
        try:
            os.setsid()
            os.close(begun)
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(file, number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = int(work() or 0)
        except BaseException:
            importlib.import_module("traceback").print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def until(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Waits until something is there or the process ended, then kills what is left; returns whether it is there."""
        end = time.monotonic() + limit_s
        ended = False
        while not is_done() and not ended and time.monotonic() < end:
            ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
            time.sleep(0.02)
        self.end()
        if not ended:
            os.waitpid(self.pid, 0)
        return is_done()


@dataclass
class Firsts:
    """Says whether a run of meshwright has recorded the steps that are waited for, and when it recorded the first."""

    run: Path
    steps: int
    summary: Path | None
    """Of the trace behind them; None where none is made."""
    started: float
    first_step_s: float = 0.0

    def __call__(self) -> bool:
        """Looks."""
        lines = _lines(self.run / "metrics.jsonl")
        self.first_step_s = self.first_step_s or (time.time() - self.started if lines else 0.0)
        return len(lines) >= self.steps and (self.summary is None or self.summary.exists())


@dataclass
class Bench:
    """The folders, the shapes and the results of a call."""

    out: Path
    work: Path
    shapes: dict[str, Shape]
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def say(self, line: dict[str, Any]) -> None:
        """Prints a result."""
        print(json.dumps(line), flush=True)

    def write_text(self, documents: int) -> None:
        """Writes documents of words whose frequencies fall as Zipf's law says, and a tokenizer of these words.

        Lengths are log-normal around 600 tokens, so that a row of 4,096 holds several documents.
        """
        # Two hold for all: ids fit both vocabularies.
        words = min(shape.vocab for shape in self.shapes.values()) - 2
        tokenizer = Tokenizer(
            models.WordLevel({"</s>": 0, "?": 1} | {f"w{index}": index + 2 for index in range(words)}, unk_token="?")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        # The model's folder has it too: its weights are trained on their own ids.
        for folder in (self.work / "tokenizer", self.work / "model"):
            folder.mkdir(exist_ok=True)
            tokenizer.save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        draw = np.random.default_rng(7)
        share = 1.0 / np.arange(3, words + 3)
        cumulative = np.cumsum(share / share.sum())
        usual = self.shapes["1.2b"].sequence * 600 / 4096
        lengths = np.clip(draw.lognormal(np.log(usual), 0.8, documents), 4, 20 * usual).astype(int)
        with (self.work / "texts.jsonl").open("w") as file:
            for length in lengths:
                ids = np.minimum(np.searchsorted(cumulative, draw.random(length)), words - 1)
                file.write('{"text": "' + " ".join(f"w{index}" for index in ids) + '"}\n')

    def prepare(self) -> Path:
        """Prepares the text and returns the set's folder."""
        words = ["prepare", *self.data_words(self.shapes["1.2b"], False, prepares=True)]
        child = Child(lambda: run_command(words), self.out / "prepare.log")
        child.until(lambda: False, CASE_LIMIT_S)
        (found,) = (path.parent for path in (self.work / "prepared").glob("*/manifest.json"))
        return found

    def data_words(self, shape: Shape, documents: bool, prepares: bool = False) -> list[str]:
        """Returns the settings of the text, as words of ``meshwright train`` or ``prepare``."""
        prefix = "--" if prepares else "--data."
        words = [*([] if prepares else ["--data"]), str(self.work / "texts.jsonl")]
        settings = {"tokenizer": self.work / "tokenizer", "validation-share": 0, "cache": self.work / "prepared"}
        words += [word for name, value in settings.items() for word in (f"{prefix}{name}", str(value))]
        if not prepares:
            words += ["--data.sequence", str(shape.sequence)]
            words += ["--data.mask-documents" if documents else "--data.no-mask-documents"]
        return words

    def write_rows(self, prepared: Path, steps: int) -> None:
        """Writes the rows of each step, as meshwright reads them, for the loops by hand."""
        shape = self.shapes["1.2b"]
        for documents in (False, True):
            loader = Loader(
                TokenSet.open(prepared).train,
                rows=shape.rows,
                sequence=shape.sequence,
                seed=0,
                mask_documents=documents,
            )
            batches = [loader.batch(step) for step in range(steps)]
            rows = {
                name: np.stack([getattr(batch, name) for batch in batches]).astype(np.int32)
                for name in ("tokens", "targets", "positions")
            }
            np.savez(self.work / f"rows-{documents}.npz", **rows)
            if documents:
                starts = int((rows["positions"] == 0).sum())
                self.say({"case": "rows", "documents_a_row": starts / (steps * shape.rows), "steps": steps})

    def write_weights(self) -> None:
        """Draws the first weights of the 1.2B on the GPU and writes them, in bf16, with the model's configuration."""
        config, folder = self.shapes["1.2b"].config(), self.work / "model"
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = LlamaForCausalLM(config)
        config.save_pretrained(folder)
        weights = {name: weight.detach().to(torch.bfloat16).cpu() for name, weight in model.named_parameters()}
        save_file(weights, folder / "model.part", {"format": "pt"})
        os.replace(folder / "model.part", folder / "model.safetensors")

    def run(self, name: str, case: Case, limit_s: float) -> None:
        """Runs a contender and prints its figures."""
        began = time.time()
        try:
            figures = self.by_hand(name, case, limit_s) if case.hand else self.by_meshwright(name, case, limit_s)
        except Exception as error:
            log = self.out / f"{name}.log"
            tail = log.read_text(errors="replace")[-1500:] if log.exists() else ""
            self.say({"case": name, "error": f"{type(error).__name__}: {error}", "log": tail})
            return
        self.results[name] = figures | {"setting": case.setting, "ours": case.hand is None}
        self.say({"case": name, "setting": case.setting, "wall_s": round(time.time() - began, 1), **figures})

    def start_by_hand(self, name: str, case: Case, steps: int, warms: bool = False) -> tuple[Child, Callable[[], bool]]:
        """Starts a loop by hand in a process of its own, of one layer if it only warms.

        Returns:
            It, and whether its figures are there.
        """
        loop, result, started = case.hand, self.work / f"{name}.json", time.time()
        assert loop is not None
        rows = self.work / f"rows-{case.documents}.npz"

        def work() -> None:
            os.nice(WARM_NICE if warms else 0)
            with _attention_order(case.cudnn):
                hand_loops.run(loop, self.work / "model", rows, steps, result, started, layers=int(warms))

        return Child(work, self.out / f"{name}.log"), result.exists

    def by_hand(self, name: str, case: Case, limit_s: float) -> dict[str, Any]:
        """Runs a loop by hand; returns its figures."""
        child, is_done = self.start_by_hand(name, case, WARM + TIMED)
        if not child.until(is_done, limit_s):
            raise RuntimeError("it ended, or its time did, before its last step")
        found = json.loads((self.work / f"{name}.json").read_text())
        return self.figures(self.shapes["1.2b"], found["step_s"], found["loss"], found) | {"loop": repr(case.hand)}

    def start_meshwright(self, name: str, case: Case, steps: int, warms: bool = False) -> tuple[Child, Firsts]:
        """Starts the command in a process of its own.

        Args:
            name: of its run directory.
            case: what it trains.
            steps: that are waited for; those of a trace come behind them.
            warms: train one layer, with few words, for the compiler's cache alone.
        """
        shape, run = self.shapes[case.shape], (self.work if warms else self.out) / name
        words = ["train", *self.data_words(shape, case.documents), *self.model_words(case, shape, warms), *case.words]
        settings = {
            "train.batch": shape.rows, "train.steps": 1000, "train.sample-tokens": 0, "optimizer.lr": "3e-4",
            "schedule.shape": "constant", "schedule.warmup": 1, "evaluation.every": 0, "checkpoint.every": 0,
            "recovery.snapshot-every": 0, "monitor.display": "none", "devices": 1, "layout": case.layout, "run": run,
        }  # fmt: skip
        words += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        words += ["--train.no-prove", "--monitor.no-report", "--monitor.no-tensorboard"]
        is_traced, summary = case.traced and not warms, self.out / f"{name}.trace-summary.json"

        def work() -> int:
            os.nice(WARM_NICE if warms else 0)
            if is_traced:
                trace_steps(steps, TRACED, self.out / f"{name}.trace.json.gz", summary)
            for part in case.without:
                PARTS[part]()
            with _attention_order(case.cudnn):
                return run_command(words)

        firsts = Firsts(run, steps, summary if is_traced else None, time.time())
        return Child(work, self.out / f"{name}.log"), firsts

    def warm(self, names: Sequence[str], limit_s: float, go: Path | None) -> None:
        """Fills the compiler's cache, with one layer of each kind: timed runs compile little then.

        Args:
            names: of the contenders.
            limit_s: for all.
            go: nothing is begun once this file is there, and what runs has `LATE_S` left.
        """
        end, waiting, kinds = time.monotonic() + limit_s, {}, {}
        for name in names:
            case = CASES[name]
            if not case.cudnn and ("compile=true" in case.layout or (case.hand and case.hand.compile)):
                kinds.setdefault((case.shape, case.layout, case.words, case.documents, case.hand, case.without), name)
        left, seconds, failed, late = list(kinds.values()), {}, [], False
        began: dict[str, float] = {}
        while (left or waiting) and time.monotonic() < end:
            if go is not None and go.exists() and not late:
                late, left, end = True, [], min(end, time.monotonic() + LATE_S)
            if left and len(waiting) < WARM_AT_ONCE:
                name = left.pop(0)
                began[name] = time.monotonic()
                start = self.start_by_hand if CASES[name].hand else self.start_meshwright
                waiting[name] = start(f"warm-{name}", CASES[name], 1, warms=True)
            for name, (child, is_done) in list(waiting.items()):
                done = is_done()
                if done or not child.alive():
                    seconds[name] = round(time.monotonic() - began[name], 1)
                    failed += [] if done else [name]
                    child.until(lambda: True, 0.0)
                    del waiting[name]
            time.sleep(0.1)
        for child, _ in waiting.values():
            child.until(lambda: True, 0.0)
        unfinished = sorted(set(kinds.values()) - set(seconds))
        self.say({"case": "warm", "first_step_s": seconds, "unfinished": unfinished, "failed": failed})

    def by_meshwright(self, name: str, case: Case, limit_s: float) -> dict[str, Any]:
        """Runs the command up to the last step that is needed; returns its figures."""
        steps, shape, run = WARM + TIMED, self.shapes[case.shape], self.out / name
        summary = self.out / f"{name}.trace-summary.json"
        child, firsts = self.start_meshwright(name, case, steps)
        done = child.until(firsts, limit_s)
        lines = _lines(run / "metrics.jsonl")
        if not done and len(lines) < steps:
            raise RuntimeError(f"{len(lines)} steps were recorded before it ended, or its time did")
        lines, plan = lines[:steps], json.loads((run / "plan.json").read_text())["prediction"]
        peak, planned = lines[-1]["memory"]["peak"], sum(plan["memory"].values())
        timed = lines[WARM:]
        parts = {part: statistics.median(line["parts"].get(part, 0.0) for line in timed) for part in timed[0]["parts"]}
        measured = {"peak_bytes": peak, "first_step_s": firsts.first_step_s}
        figures = self.figures(shape, [line["step_s"] for line in lines], [line["loss"] for line in lines], measured)
        if case.layers:
            figures.pop("mfu", None)
        step_s = figures["step_ms"] / 1e3
        figures |= {
            "layout": case.layout,
            "planned_bytes": planned,
            "peak_of_planned": round(peak / planned, 4),
            "planned_parts": plan["memory"],
            "planned_step_ms": round(plan["step_s"] * 1e3, 2),
            "step_of_planned": round(step_s / plan["step_s"], 4),
            "parts_ms": {part: round(spent * 1e3, 3) for part, spent in parts.items()},
            "own_mfu": timed[-1]["mfu"],
        }
        if case.traced:
            trace = json.loads(summary.read_text()) if summary.exists() else None
            self.say({"case": f"{name}-trace", "steps": TRACED, "summary": trace})
        return figures

    def model_words(self, case: Case, shape: Shape, warms: bool) -> list[str]:
        """Returns the model as words of ``meshwright train``: the folder of the 1.2B, or a llama with weights drawn."""
        if case.shape == "1.2b":
            words = ["--model", str(self.work / "model"), "--data.tokenizer", str(self.work / "model")]
            return [*words, *(("--model.fresh", "--model.layers", "1") if warms else ())]
        sizes = {
            "layers": 1 if warms else case.layers or shape.layers, "width": shape.width, "heads": shape.heads,
            "ffn": shape.ffn, "kv-heads": shape.kv_heads, "context": shape.sequence,
            "vocab": self.shapes["1.2b"].vocab if warms else shape.vocab,
        }  # fmt: skip
        return ["--model", "llama", *(word for key, value in sizes.items() for word in (f"--model.{key}", str(value)))]

    def figures(self, shape: Shape, step_s: list[float], loss: list[float], found: dict[str, Any]) -> dict[str, Any]:
        """Returns what is reported of every contender."""
        timed, tokens = step_s[WARM:], shape.rows * shape.sequence
        median = max(statistics.median(timed), 1e-9)
        return {
            "step_ms": round(median * 1e3, 2),
            "step_ms_least_most": [round(min(timed) * 1e3, 2), round(max(timed) * 1e3, 2)],
            "tokens_per_s": round(tokens / median),
            "mfu": round(shape.flops_per_token() * tokens / median / PEAK, 4),
            "peak_bytes": found["peak_bytes"],
            "first_step_s": round(found["first_step_s"], 2),
            "loss": [round(value, 5) for value in loss[:6]],
        }

    def compare(self) -> bool:
        """Prints ratios to the best script of each setting; returns whether first losses agree."""
        agree, ratios = True, {}
        for setting in {case.setting for case in CASES.values() if case.setting}:
            here = {name: found for name, found in self.results.items() if found["setting"] == setting}
            scripts = {name: found["step_ms"] for name, found in here.items() if not found["ours"]}
            best = min(scripts, key=lambda name: scripts[name], default="")
            for name in (name for name, found in here.items() if found["ours"] and best):
                pairs = zip(here[name]["loss"][:ALIKE_STEPS], here[best]["loss"])
                apart = max(abs(ours - theirs) / max(abs(theirs), 1e-9) for ours, theirs in pairs)
                # In 8 bits two programs scale other tensors: their losses differ by more than bf16 rounds.
                agree &= apart <= ALIKE * (4 if setting == "fp8" else 1)
                ratios[name] = {
                    "script": best,
                    "speed": round(scripts[best] / here[name]["step_ms"], 4),
                    "peak": round(here[name]["peak_bytes"] / max(1, here[best]["peak_bytes"]), 4),
                    "losses_apart": round(apart, 6),
                }
        self.say({"case": "ratios", "agree": agree, "of_best_script": ratios, "of_before": self.of_before()})
        for kind, bar in BARS.items():
            self.project(kind, bar)
        return agree

    def of_before(self) -> dict[str, dict[str, float]]:
        """Returns speed, peak and distance of the first losses of what also ran without a part."""
        ratios = {}
        for name, case in CASES.items():
            own = name.replace("before", "ours").replace("copies", "ours")
            if case.without and name in self.results and own in self.results:
                before, now = self.results[name], self.results[own]
                pairs = zip(now["loss"][:ALIKE_STEPS], before["loss"])
                ratios[name] = {
                    "speed": round(before["step_ms"] / now["step_ms"], 4),
                    "peak": round(now["peak_bytes"] / max(1, before["peak_bytes"]), 4),
                    "losses_apart": round(max(abs(ours - theirs) for ours, theirs in pairs), 6),
                }
        return ratios

    def project(self, kind: str, bar: float) -> None:
        """Prints tokens/s a GPU of 32 layers, by the time that three more layers take; no communication is in it.

        Of update and norm, which FSDP over 8 GPUs divides, an eighth counts; beside it the whole.
        """
        four, one = (self.results.get(f"8b-{layers}-{kind}") for layers in (4, 1))
        if four is None or one is None:
            return
        shape = self.shapes["8b"]

        def whole(read: Callable[[dict[str, Any]], float]) -> float:
            """Returns a time of 32 layers by a line through those of 1 and 4."""
            return read(four) + (LAYERS_8B - 4) * (read(four) - read(one)) / 3

        step_ms = whole(lambda found: found["step_ms"])
        update_ms = whole(lambda found: found["parts_ms"]["optimizer"] + found["parts_ms"]["norm"])
        sharded_ms = max(step_ms - update_ms * (1 - 1 / GPUS_8B), 1e-6)
        tokens = shape.rows * shape.sequence
        self.say({
            "case": f"8b-projection-{kind}", "layers": LAYERS_8B, "step_ms": round(sharded_ms, 1),
            "tokens_per_s_per_gpu": round(tokens / sharded_ms * 1e3), "bar": bar,
            "of_bar": round(tokens / sharded_ms * 1e3 / bar, 4), "with_whole_update": round(tokens / step_ms * 1e3),
            "mfu": round(shape.flops_per_token(LAYERS_8B) * tokens / sharded_ms * 1e3 / PEAK, 4),
            "layer_ms": round((four["step_ms"] - one["step_ms"]) / 3, 3),
            "ends_ms": round(one["step_ms"] - (four["step_ms"] - one["step_ms"]) / 3, 3),
            "is": "a projection from 1 and 4 layers on one GPU, without communication",
        })  # fmt: skip


@contextlib.contextmanager
def _attention_order(cudnn_first: bool) -> Iterator[None]:
    """Has torch's attention prefer cuDNN's kernel, in this process and those that it forks."""
    if not cudnn_first:
        yield
        return
    # Which kernel attention takes is chosen when a layer is compiled, and is no part of the cache's key.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-cudnn-")
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


def await_go(go: Path) -> float:
    """Waits for the file and returns the monotonic time at which its limit ends; ends with who would write it."""
    parent = os.getppid()
    while not go.exists():
        if os.getppid() != parent:
            sys.exit(1)
        time.sleep(0.05)
    return time.monotonic() - (time.time() - go.stat().st_mtime) + float(go.read_text())


def _lines(path: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of a file of JSON lines, none where there is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def main() -> int:
    """Runs the chosen contenders within the limit; 0 when all that ran agree and none failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="names, separated by commas, in their order; all when not given")
    parser.add_argument("--limit-s", type=float, default=170.0)
    parser.add_argument("--case-limit-s", type=float, default=CASE_LIMIT_S, help="of each contender")
    parser.add_argument("--no-warm", action="store_true", help="compile in the timed runs alone")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the part itself")
    parser.add_argument("--go", type=Path, help="file awaited after the setup; it holds the limit from then on")
    parser.add_argument("--work", type=Path, default=Path("/tmp/meshwright-throughput"), help="for what isn't kept")
    options = parser.parse_args()
    end = time.monotonic() + options.limit_s
    for name in ("torch._inductor.compile_fx", "torch._dynamo", "torch.profiler", "meshwright.jobs.train"):
        importlib.import_module(name)
    work = options.work / f"{os.getpid()}-{random.randrange(1 << 30)}"
    work.mkdir(parents=True)
    bench = Bench(options.out, work, TINY if options.tiny else SHAPES)
    chosen = options.only.split(",") if options.only else list(CASES)
    weights = Child(bench.write_weights, options.out / "weights.log")
    steps = WARM + TIMED
    tokens = max(shape.rows * shape.sequence for shape in bench.shapes.values()) * (steps + 6)
    bench.write_text(documents=round(tokens / (bench.shapes["1.2b"].sequence * 600 / 4096 * 1.3)))
    bench.write_rows(bench.prepare(), steps)
    if not weights.until((work / "model" / "model.safetensors").exists, CASE_LIMIT_S):
        bench.say({"case": "weights", "error": (options.out / "weights.log").read_text()[-1500:]})
        return 1
    if not options.no_warm:
        bench.warm(chosen, WARM_LIMIT_S if options.go else min(WARM_LIMIT_S, options.limit_s / 3), options.go)
    bench.say({"case": "setup", "seconds": round(options.limit_s - (end - time.monotonic()), 1), "order": chosen})
    if options.go:
        end = await_go(options.go)
    for name in chosen:
        left = end - time.monotonic()
        if left < CASE_LEAST_S:
            bench.say({"case": name, "skipped": f"{left:.0f} s are left"})
            continue
        bench.run(name, CASES[name], min(options.case_limit_s, left - 2.0))
    agree = bench.compare()
    return int(not agree or any(name not in bench.results for name in chosen))


if __name__ == "__main__":
    sys.exit(main())
