"""One GPU: every precision, offload and compilation trains along the curve of plain float32; input is pinned."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from meshwright.launch.devices import count_gpus
from tests.runs import Running, call, curve, events, rows, words, write_corpus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not count_gpus(), reason="no GPU"),
]
STEPS = 12
ROOT = Path(__file__).parents[2]
LIMIT_S = 200.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpu")
    write_corpus(root / "corpus.txt")
    return root


def started(root: Path, layout: str, *more: str) -> Running:
    """Starts a run on one GPU under a layout."""
    run = name_of(layout)
    argv = words(root, run, "--train.steps", str(STEPS), "--checkpoint.every", "6", *more, layout=layout)
    return Running(argv, root / f"{run}.log", lambda: warnings.simplefilter("ignore"))


def name_of(layout: str) -> str:
    return "run-" + layout.replace("=", "-").replace(",", "-")


def finished(root: Path, layout: str, running: Running) -> dict[int, tuple[float, float]]:
    """Waits for a run, which must end well on the GPU, and returns its curve."""
    assert running.wait(LIMIT_S) == 0, running.text()
    running.no_orphans()
    assert events(root / name_of(layout), "rank_started")[0]["device"] == "cuda:0"
    return curve(root / name_of(layout))


def trained(root: Path, layout: str, *more: str) -> dict[int, tuple[float, float]]:
    """Trains on one GPU under a layout and returns the curve."""
    return finished(root, layout, started(root, layout, *more))


@pytest.fixture(scope="module")
def plain(root: Path) -> dict[int, tuple[float, float]]:
    return trained(root, "replicate=1")


@pytest.mark.parametrize(
    ("layout", "bound"),
    [
        ("precision=bf16", 2e-2),
        ("precision=fp16", 1e-2),
        ("precision=float64", 1e-4),
        ("microbatches=4", 1e-4),
        ("recompute=full", 1e-4),
        ("recompute=selective,precision=bf16", 2e-2),
        ("offload=optimizer", 1e-4),
        ("offload=parameters", 1e-4),
        ("offload=parameters,precision=bf16,microbatches=2", 2e-2),
        ("compile=true", 1e-3),
        ("compile=true,precision=bf16", 2e-2),
    ],
)
def test_layouts_train_along_the_curve_of_float32(layout: str, bound: float, root: Path, plain: dict) -> None:
    found = trained(root, layout)
    assert sorted(found) == sorted(plain)
    for step, (loss, _) in plain.items():
        assert found[step][0] == pytest.approx(loss, rel=bound)


def test_half_precision_scales_its_loss_and_skips_alike(root: Path) -> None:
    trained(root, "precision=fp16,microbatches=2")
    found = rows(root / "run-precision-fp16-microbatches-2")
    skipped = [row["step"] for row in found if row["skipped"]]
    assert len(skipped) < STEPS // 2
    assert found[-1]["loss"] < found[0]["loss"]


def test_offload_takes_state_off_the_device(root: Path, plain: dict) -> None:
    """In bf16: in float32 both kinds leave as much, all weights and the sums of micro-batches, and so equal peaks."""
    sizes = ("--model.width", "256", "--model.layers", "8")
    kinds = ("replicate=1", "offload=optimizer", "offload=parameters")
    layouts = [f"{kind},microbatches=2,precision=bf16" for kind in kinds]
    runs = [started(root, layout, *sizes) for layout in layouts]
    for layout, run in zip(layouts, runs):
        finished(root, layout, run)
    plain_memory, *memories = [rows(root / name_of(layout))[-1]["memory"] for layout in layouts]
    # Masters and two moments, in float32 each.
    masters = plain_memory["optimizer"] / 3
    left = [plain_memory["peak"] - memory["peak"] for memory in memories]
    assert left[0] > 1.8 * masters and left[1] > 2.8 * masters


def test_resume_is_exact_on_the_device(root: Path) -> None:
    argv, one = (
        words(root, run, "--train.steps", "12", "--schedule.shape", "constant") for run in ("parted", "in-one")
    )
    in_one = Running(one, root / "in-one.log")
    for more in (("--train.steps", "6"), ()):
        status, text = call([*argv, *more], root / "parted.log", limit_s=LIMIT_S)
        assert status == 0, text
    assert in_one.wait(LIMIT_S) == 0, in_one.text()
    assert curve(root / "parted") == curve(root / "in-one")


PINNED = """
import sys
from pathlib import Path
import numpy as np
import torch
from meshwright.data.loader import Loader
from meshwright.data.prefetch import Prefetcher, tensors
from meshwright.data.tokens import TokenSet

pinned = []
pin = torch.Tensor.pin_memory
torch.Tensor.pin_memory = lambda self, *args: pinned.append(self.shape) or pin(self, *args)
loader = Loader(TokenSet.open(Path(sys.argv[1])).train, rows=4, sequence=16, seed=0)
with Prefetcher(loader, 0, depth=2, to_device=lambda batch: tensors(batch, torch.device("cuda:0"))) as ahead:
    for step in range(5):
        found, wanted = next(ahead), loader.batch(step)
        assert found.tokens.is_cuda and found.tokens.dtype == torch.int64
        assert np.array_equal(found.tokens.cpu().numpy(), wanted.tokens)
        assert np.array_equal(found.targets.cpu().numpy(), wanted.targets)
assert len(pinned) >= 10
print("pinned")
"""


def test_input_is_pinned_and_read_ahead(root: Path, plain: dict) -> None:
    (folder,) = (path for path in (root / "prepared").iterdir() if path.is_dir())
    done = subprocess.run(
        [sys.executable, "-c", PINNED, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and "pinned" in done.stdout, done.stderr
