"""The questions of ``meshwright plan`` as commands: tables, JSON, exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshwright
from meshwright.cli.main import main
from meshwright.cli.plan import _named_models
from meshwright.errors import ConfigError

SIZES = "layers=4,width=512,heads=8,vocab=8000,ffn=1376"
WORDS = ("plan", "--sizes", SIZES, "--batch", "8", "--sequence", "512", "--fix", "offload=none,microbatches=2")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--cluster", "1xh100", "--tokens", "1B"), ("device hours", "takes: 1xh100", "MFU")),
        (("--cluster", "1xh100", "--cluster", "1xa100-80", "--tokens", "1B", "--days", "9"), ("cheapest:", "kWh")),
        (("--cluster", "1xt4", "--largest"), ("parameters", "asked: 4 layers", "largest:")),
        (("--cluster", "1xt4", "--longest"), ("asked: 512 tokens", "largest:")),
        (("--cluster", "1xh100", "--what-if", "flops=2x,memory=2x"), ("today", "flops=2x,memory=2x", "gain")),
        (("--cluster", "1xh100", "--layout", "microbatches=2", "--measured-s", "1"), ("measured", "doesn't explain")),
        (("--cluster", "1xh100", "--walls"), ("compute: a step is", "memory: weights", "nearest wall:")),
        (("--cluster", "1xh100", "--reshape"), ("nearby sizes", "today")),
        (("--cluster", "1xh100", "--emit", "megatron"), ("--tensor-model-parallel-size 1", "--global-batch-size 8")),
    ],
)
def test_each_question_has_a_table_and_json(
    more: tuple[str, ...], says: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, *more]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in says), out
    assert main([*WORDS, *more, "--json"]) == 0
    assert "mfu" in json.dumps(json.loads(capsys.readouterr().out))


def test_the_batch_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--sizes", SIZES, "--cluster", "1xh100", "--sequence", "512", "--batch", "auto"]
    assert main(words) == 0
    assert "knee" in capsys.readouterr().out


def test_a_deadline_that_nothing_meets_is_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--cluster", "1xh100", "--tokens", "1T", "--days", "0.1"]
    assert main(words) == 2
    assert "none ends within 0.1 days; the fastest is 1xh100" in capsys.readouterr().out
    assert main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["chosen"] is None


def test_the_cheapest_number_of_devices_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--cluster", "2xh100", "--devices", "1..2", "--objective", "cost"]) == 0
    assert "fewest dollars a token:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--tokens", "1T", "--days", "0"), "days = 0.0: write a number above 0, as --days 30"),
        (("--layout", "microbatches=2", "--measured-s", "0"), "measured_s = 0.0: write a number above 0"),
        (("--layout", "microbatches=2", "--measured-s", "-2"), "measured_s = -2.0: write a number above 0"),
        (
            ("--layout", "microbatches=2", "--measured-s", "1e-5"),
            "of the dense peak of 1xh100 in bf16; a step of 8 rows",
        ),
        (("--what-if", "nick=2x"), "did you mean 'nic'?"),
    ],
)
def test_what_no_run_can_be_is_refused(more: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--cluster", "1xh100", *more]) == 2
    assert why in capsys.readouterr().err


def test_a_model_is_named_by_its_preset_or_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["--cluster", "1xh100", "--batch", "8", "--sequence", "512", "--json"]
    assert main(["plan", "--model", "smollm2-135m", *rest]) == 0
    named = json.loads(capsys.readouterr().out)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "tie_word_embeddings": True, "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    # No weights lie beside it; transformers builds the family, another way to the same sizes.
    words = _named_models(["--model", str(tmp_path / "config.json")])
    assert words == ["--model", str(tmp_path)]
    read = meshwright.plannable_model(str(tmp_path / "config.json"), 512)
    assert read.shape.parameters == named["model"]["parameters"] == 134_515_008
    assert main(["plan", "--model", "smollm2-134m", *rest]) == 2
    assert "did you mean 'smollm2-135m'?" in capsys.readouterr().err


def test_questions_are_asked_in_python() -> None:
    config = meshwright.PlanConfig(sizes=SIZES, cluster="1xh100", batch=8, sequence=512, walls=True)
    assert meshwright.ask(config).to_json()["nearest"]
    with pytest.raises(ConfigError, match="no question is asked"):
        meshwright.ask(meshwright.PlanConfig(sizes=SIZES, cluster="1xh100"))
