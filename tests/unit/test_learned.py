"""What sessions learn about a pair is saved and loaded; a damaged file is learned again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import classifier

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.drafting.classifier import FEATURES, Classifier, load_classifier
from specexec_cli.drafting.learned import Learned, pair_folder
from specexec_cli.drafting.scoring import DraftScorer
from specexec_cli.errors import CheckpointError
from specexec_cli.planning.expected_speed import Run
from specexec_cli.sampling import Sampler
from specexec_cli.session.learned_file import LearnedFile


def learned(sharpness: float = 0.5) -> Learned:
    found = Learned()
    scorer = DraftScorer(Sampler(SamplingConfig()), "noise")
    scorer.trust.losses[:] = 1.0
    scorer.trust.losses[3] = 0.0
    found.keep("greedy", scorer.trust)
    for rows in (10, 20, 30):
        found.cost.observe(rows, 2, 0.1, 1.0)
    return found


def test_a_later_session_begins_where_the_last_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "pairs" / "learned.json"
    learned().save(path, "ssd cpu float32")
    later = Learned()
    later.load(path, "ssd cpu float32")
    trust = later.trust("greedy")
    assert trust is not None
    assert trust.sharpness == pytest.approx(0.51)
    assert later.cost.typical == learned().cost.typical
    assert later.trust("noise") is None


def test_costs_are_of_one_way_to_run_and_others_keep_theirs(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    learned().save(path, "ssd cpu float32")
    resident = Learned()
    resident.load(path, "none cpu float32")
    assert resident.cost.iterations == 0
    resident.save(path, "none cpu float32")
    again = Learned()
    again.load(path, "ssd cpu float32")
    assert again.cost.iterations == 3


def test_sessions_with_layers_on_other_machines_have_costs_of_their_own(tmp_path: Path) -> None:
    settings = {"offload": "ram", "device": "cpu", "dtype": "float32"}
    run = Run(date="2026-01-02", offload="ram", device="cpu", tokens=60, passes=10, seconds=5.0)
    ways = (settings, {**settings, "hosts": "attic 4-7"})
    alone, over = (LearnedFile(tmp_path, tmp_path / "runs.json", way, print) for way in ways)
    alone.save(learned(), run)
    for file, iterations in ((alone, 3), (over, 0)):
        found = Learned()
        file.load(found)
        assert found.cost.iterations == iterations


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schema": 0}', '{"schema": 3, "costs": {}, "trusts": {"greedy": {}}}',
     '{"schema": 3, "costs": {"m": [[1]]}, "trusts": {}}', '{"schema": 3, "costs": 3}', b"\xff",
     "[" * 100_000, '{"schema": 3, "costs": {"m": {"prior": [1, 1, 1, 1, 1], "iterations": '
     '[[-1, 2, 0.1, 1.0]]}}, "trusts": {}}', '{"schema": 3, "costs": {"m": {"prior": '
     '[NaN, 1, 1, 1, 1], "iterations": []}}, "trusts": {}}',
     '{"schema": 3, "costs": {"m": {"prior": [1, 1, 1, 1, 0], "iterations": []}}, "trusts": {}}'],
)  # fmt: skip
def test_a_damaged_file_is_learned_anew(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "learned.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = Learned()
    found.load(path, "m")
    assert found.trust("greedy") is None
    assert found.cost.iterations == 0
    found.save(path, "m")
    found.load(path, "m")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_stands_in_the_file_it_is_ignored_or_makes_sense(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What a session wrote, with anything at all in the place of one of its parts."""
    path = tmp_path_factory.mktemp("kept") / "learned.json"
    learned().save(path, "m")
    kept = json.loads(path.read_text())
    place, keys = kept, []
    while isinstance(place, dict | list) and len(place) and data.draw(st.integers(0, 4)):
        names = list(place) if isinstance(place, dict) else range(len(place))
        keys.append(data.draw(st.sampled_from(list(names))))
        place = place[keys[-1]]
    spoilt = data.draw(JSON)
    if keys:
        inside = kept
        for key in keys[:-1]:
            inside = inside[key]
        inside[keys[-1]] = spoilt
    else:
        kept = spoilt
    path.write_text(json.dumps(kept))
    found = Learned()
    found.load(path, "m")
    cost = found.policy(TreeConfig(budget=32, max_depth=8, policy="cost"))
    seconds = found.cost.seconds(np.arange(1.0, 40.0), 3)
    assert np.isfinite(seconds).all()
    assert (seconds > 0.0).all()
    assert cost is not None
    found.save(path, "m")
    found.load(path, "m")


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    found = Learned()
    found.load(tmp_path, "m")
    assert found.cost.iterations == 0


def test_policies_go_on_where_they_were() -> None:
    found, tree = Learned(), TreeConfig(policy="heuristic")
    assert found.policy(tree) is found.policy(tree)
    assert found.policy(TreeConfig(policy="cost")) is not found.policy(tree)


def test_pairs_are_kept_apart() -> None:
    folders = {
        pair_folder("org/model", "a"),
        pair_folder("org/model", "b"),
        pair_folder("/x/y", "a"),
    }
    assert len(folders) == 3
    assert all(folder.parent == pair_folder("m", "n").parent for folder in folders)


def test_a_classifier_comes_back(tmp_path: Path) -> None:
    kept = classifier()
    kept.save(tmp_path, {"target": "t", "draft": "d"})
    found = load_classifier(tmp_path, "t", "d")
    features = np.random.default_rng(0).normal(size=(5, FEATURES))
    np.testing.assert_array_equal(found.probabilities(features), kept.probabilities(features))
    assert (found.threshold, found.max_length) == (kept.threshold, kept.max_length)


def _without(name: str) -> Classifier:
    tensors = {key: value for key, value in classifier().tensors.items() if key != name}
    return Classifier(tensors, 0.5, 8)


def _retold(folder: Path, key: str, value: str) -> None:
    """Writes another value, as JSON, into what is said about the classifier."""
    path = folder / "disco.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, key: "HERE"}).replace('"HERE"', value))


DAMAGES = {
    "missing": (lambda folder: (folder / "disco.json").unlink(), "no classifier"),
    "no weights": (lambda folder: (folder / "disco.safetensors").unlink(), "No such file"),
    "cut off": (lambda folder: (folder / "disco.json").write_text("{"), "cannot be used"),
    "other weights": (
        lambda folder: (folder / "disco.safetensors").write_bytes(b"x" * 9), "not the weights",
    ),
    "a tensor less": (lambda folder: _without("out.bias").save(folder, PAIR), "tensors"),
    "wrong shape": (
        lambda folder: Classifier(
            {**classifier().tensors, "out.bias": np.zeros(2)}, 0.5, 8
        ).save(folder, PAIR), "out.bias must be",
    ),
    "threshold": (
        lambda folder: Classifier(classifier().tensors, 2.0, 8).save(folder, PAIR), "out of range",
    ),
    "another pair's": (
        lambda folder: classifier().save(folder, {"target": "x", "draft": "y"}), "of x with y",
    ),
    "schema": (
        lambda folder: classifier().save(folder, {**PAIR, "schema": 9}), "schema 9",
    ),
    "nested": (
        lambda folder: (folder / "disco.json").write_text("[" * 100_000), "nested more than",
    ),
    "a length without end": (lambda folder: _retold(folder, "max_length", "Infinity"), "infinity"),
    "a threshold too long": (lambda folder: _retold(folder, "threshold", "1" * 400), "40 digits"),
    "no object": (lambda folder: (folder / "disco.json").write_text("null"), "cannot be used"),
}  # fmt: skip
PAIR = {"target": "t", "draft": "d"}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_classifier_that_cannot_be_used_is_refused_with_the_mend(
    tmp_path: Path, name: str
) -> None:
    classifier().save(tmp_path, PAIR)
    damage, words = DAMAGES[name]
    damage(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        load_classifier(tmp_path, "t", "d")
    assert words in str(refusal.value)
    assert "specexec train-policy t --draft d" in str(refusal.value)
