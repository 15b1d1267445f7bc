"""``meshwright plan`` answers people and programs, and refuses nonsense in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main

SIZES = "layers=8,width=2048,heads=16,vocab=32000,ffn=5632"
WORDS = ("plan", "--sizes", SIZES, "--batch", "32", "--sequence", "1024")


def test_json_says_what_the_table_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "sub" / "plan.html"
    words = [*WORDS, "--cluster", "8xh100", "--layout", "pp=4,replicate=2,microbatches=4", "tp=3", "--html", str(page)]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["best"][0]
    assert found["plan"] == best["layout"]["text"] and found["devices"] == 8
    assert sum(best["price"]["parts"].values()) == pytest.approx(best["price"]["step_s"])
    assert len(found["compared"]) == 2 and any(told.startswith("can't be") for told in found["compared"].values())
    assert found["search"]["considered"] > 100 and found["front"]
    text = page.read_text()
    assert "<svg" in text and "http" not in text.replace("http://www.w3.org", "")


def test_people_get_tables_and_a_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--cluster", "8xa100-40", "--fix", "pp=4", "--show", "2"]) == 0
    out = capsys.readouterr().out
    assert "against the first" in out and "rank 3" in out and "matrix products" in out


def test_what_is_asked_for_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--cluster", "8xh100", "--fix", "offload=optimizer", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert all(one["layout"]["offload"] == "optimizer" and one["price"]["host"] > 0 for one in best)
    assert main([*WORDS, "--cluster", "8xh100", "--fix", "offload=optimizer"]) == 0
    assert "in host memory" in capsys.readouterr().out
    steps = {}
    for more in ("--no-compile", "--compile"):
        assert main([*WORDS, "--cluster", "8xh100", more, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["best"][0]
        assert found["layout"]["compile"] is (more == "--compile") and not found["price"]["host"]
        steps[more] = found["price"]["step_s"]
    assert steps["--compile"] < steps["--no-compile"]


def test_a_hostfile_names_each_host_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("alpha slots=4\nbeta slots=4  # beside it\nalpha slots=4\n")
    assert main([*WORDS, "--hostfile", str(hosts), "--device", "h100"]) == 2
    assert ":3: alpha is named twice" in capsys.readouterr().err


def test_the_curve_names_its_knee(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--cluster", "32xh100", "--devices", "8..32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [point["devices"] for point in found["points"]] == [8, 16, 32] and found["knee"] in (None, 8, 16)


def test_a_curve_without_a_knee_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*WORDS, "--batch", "4096", "--cluster", "16xh100", "--devices", "8..16"]
    assert main(rows) == 0
    assert "no knee up to 16 devices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--cluster", "8xh1000"), "unknown device|no cluster|nearest"),
        (("--cluster", "8xh100", "--objective", "energy", "--usable", "0"), "usable"),
        (("--cluster", "8xh100", "--fix", "tp=3"), "tp=3"),
        (("--cluster", "8xh100", "--fix", "recompute=full"), "fix: 'recompute' can't be given"),
        (("--cluster", "8xh100", "--fix", "tp=2,tp=4"), "fix: tp is given twice; leave one of them out"),
        (("--cluster", "8xh100", "--html", "/"), "html = / can't be written: Is a directory; name a file"),
        (("--cluster", "8xh100", "--fix", "ep=8"), "has no experts; leave ep out"),
        (("--cluster", "8xh100", "--devices", "0..8"), "--devices 0..8: numbers of devices go up from 1"),
        (("--cluster", "8xh100", "--batch", "1" + 23 * "0"), "a plan is for at most 1048576 rows"),
        (("--cluster", "8xh100", "--fix", "offload=disk"), "fix: offload=disk; known: none, optimizer, parameters"),
        (("--cluster", "8xcpu", "--fix", "offload=optimizer"), "no host memory for it"),
        (("--cluster", "8xh100", "--fix", "replicate=8", "--batch", "3"), "replicate=8 with a batch of 3 rows"),
        (("--cluster", "8xh100", "--schedules", "zigzag"), "no such schedule"),
        (("--cluster", "8xh100", "--sizes", "layers=2,wide=3"), "'wide=3' is unknown"),
        (("--cluster", "8xh100", "--sizes", f"{SIZES},kv_heads=5"), "kv_heads=5 don't divide .* works: kv_heads=4"),
        (("--cluster", "8xh100", "--sizes", f"{SIZES},kv_heads=32"), "works: kv_heads=16"),
        (("--cluster", "8xh100", "--sizes", f"{SIZES},active_experts=2"), "of a model with experts"),
        (("--cluster", "8xh100", "--sizes", f"{SIZES},experts=8"), "need active_experts"),
        (("--cluster", "8xh100", "--sizes", f"{SIZES},experts=8,active_experts=9,expert_ffn=64"), "from 1 to as many"),
        (
            ("--cluster", "8xh100", "--sizes", f"{SIZES},experts=8,active_experts=2,expert_ffn=64,dense_layers=8"),
            "dense_layers=8 of 8 layers leave none",
        ),
        (("--cluster", "8xh100", "--sizes", f"{SIZES},layers=3"), "layers is given twice"),
        (("--cluster", "8xh100", "--sizes", f"{SIZES},gated=ture"), "gated=ture is neither true nor false"),
        (("--cluster", "8xh100", "--sizes", f"{SIZES},window=\u00b2"), "is not a whole number"),
        (("--cluster", "8xh100", "--sizes", "layers=100000000,width=64,heads=4,vocab=9"), "it goes up to 10000"),
        (
            ("--cluster", "8xh100", "--sizes", f"layers=2,width={'9' * 5000},heads=4,vocab=9"),
            "more than can be planned",
        ),
        (("--cluster", "1xrtx3090", "--sizes", "layers=96,width=12288,heads=96,vocab=51200"), "nearest that would"),
        (("--hostfile", "hosts"), "device"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(more: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    assert main([*WORDS, *more]) == 2
    assert re.search(why, capsys.readouterr().err)
