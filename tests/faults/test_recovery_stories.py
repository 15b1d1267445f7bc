"""One controller leads one node as the supervisor of one node did: the same faults give the same events in their order.

`stories.json` was recorded before there was one controller; how, `stories.py` says. Since then the last line of
`always` changed: an exception that comes again in the same step ends the run with a sentence of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.stories import SCENARIOS, STORIES, is_like, tell
from tests.runs import write_corpus
from tests.tiers import cases

pytestmark = pytest.mark.slow
RECORDED = json.loads(STORIES.read_text(encoding="utf-8"))
EACH_TIME = ("starts", "waits", "rewind", "damaged-snapshot", "steps-down", "fruitless", "no-memory")
"""Stories of which no other test tells each time."""
FROM_MEMORY = ["restored", ["bytes", "seconds", "step", "tier"], {"tier": "memory"}]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stories")
    write_corpus(root / "corpus.txt")
    return root


def test_every_story_is_recorded() -> None:
    assert RECORDED.keys() == SCENARIOS.keys()


@pytest.mark.parametrize("name", cases(SCENARIOS, EACH_TIME))
def test_a_story_is_what_it_was(name: str, root: Path) -> None:
    found = tell(root, name)
    if name == "damaged-snapshot":
        # The kill may interrupt the copy over the older snapshot: then the checkpoint is what is left.
        found["story"] = [FROM_MEMORY if event[0] == "resumed" else event for event in found["story"]]
    assert is_like(found, RECORDED[name]), json.dumps([found, RECORDED[name]])
