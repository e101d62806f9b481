"""scripts/measure_past.py: a target with a given text, and drafts from the text's past."""

from __future__ import annotations

import json
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from measure_past import KnownText, passes_of  # noqa: E402

from specexec_cli.config import TreeConfig  # noqa: E402
from specexec_cli.core import DraftTree  # noqa: E402

TREE = TreeConfig(budget=16, max_depth=8, past=True)


def test_the_past_drafts_what_is_copied_and_nothing_else() -> None:
    prompt = list(range(100, 140))
    copied, new = prompt[5:30], list(range(300, 325))
    assert passes_of(None, "suffix", TREE, prompt, new, 400) == len(new)
    assert passes_of(None, "suffix", TREE, prompt, copied, 400) < len(copied) / 3


def test_logits_are_highest_at_the_known_token_behind_the_root_and_behind_nodes() -> None:
    target = KnownText([1, 2, 3, 4], 9)
    logits = target.verify([1], DraftTree.chain([2, 7]))
    assert logits.argmax(-1).tolist() == [2, 3, 4]
    target.commit([0])
    assert target.tokens == [1, 2]


def test_there_are_twenty_prompts_and_every_edit_is_one() -> None:
    records = json.loads((SCRIPTS / "past_prompts.json").read_text("utf-8"))
    assert [sum(one["kind"] == kind for one in records) for kind in ("edit", "summary")] == [10, 10]
    assert len({one["id"] for one in records}) == 20
    assert not [one["id"] for one in records if one["answer"] in one["prompt"]]
