"""A text over recurrent layers that fails or is interrupted goes on as if nothing had happened.

As in test_recovery.py, but here a state cannot be cut back, and a copy of the target goes on from
the target's states. There are thousands of points; a few lines of each file that keeps states are
drawn, and for each one of the times that it is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from faults import Interruption, NoMemory, Point, Site, points
from gguf_toys import save_hybrid
from test_recovery import Conversation, break_at
from test_recurrent_states import KINDS, rows_of

from specexec_cli.models import recurrent
from specexec_cli.models.recurrent import RecurrentState
from specexec_cli.session import Session, TextSession

KEEPERS = (
    "recurrent.py",
    "linear_attention.py",
    "shared_cache.py",
    "layer_state.py",
    "verifier.py",
)
_LINES = 2  # of each file
_TEXT = list(range(1, 19))
_BRANCH = [50, 51, 52]  # nodes that are not accepted, and what follows on a crop


@pytest.fixture(scope="module", params=["self", "target"])
def hybrids(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TextSession, TextSession]]:
    """With a copy that goes on from the target's recurrent states, and with a draft model."""
    folder = tmp_path_factory.mktemp("hybrid")
    save_hybrid(folder / "target")
    target = str(folder / "target")
    draft = "self" if request.param == "self" else target
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(recurrent, "_TURN_ROWS", 4)  # both turns make checkpoints
        with (
            Session.open(
                model=target, draft=draft, dtype="float32", offload="ssd", device="cpu"
            ) as session,
            Session.open(
                model=target, dtype="float32", device="cpu", method="autoregressive"
            ) as plain,
        ):
            assert session.decision.work.shares_cache == (draft == "self")
            yield session, plain


@pytest.mark.parametrize("kind", [NoMemory, Interruption])
def test_the_next_turn_and_the_states_are_right(
    hybrids: tuple[TextSession, TextSession], kind: type[NoMemory] | type[Interruption]
) -> None:
    conversation = Conversation(*hybrids, "specexec", 0.8)
    chosen = drawn(conversation.record(kind()))
    assert any(point[0][0].endswith("/recurrent.py") for point in chosen)
    break_at(conversation, kind, chosen)


def drawn(found: Sequence[Point]) -> list[Point]:
    """A point on each of some lines of every file that keeps states."""
    draws, lines = Random(38), dict[str, dict[Site, list[Point]]]()
    for point in found:
        if (name := Path(point[0][0]).name) in KEEPERS:
            lines.setdefault(name, {}).setdefault(point[0], []).append(point)
    return [
        draws.choice(of_file[site])
        for _, of_file in sorted(lines.items())
        for site in draws.sample(sorted(of_file), min(_LINES, len(of_file)))
    ]


class Text:
    """A text of one state, which knows of a pass or a crop when it is done, as a target does."""

    def __init__(self, kind: Callable[[], RecurrentState]) -> None:
        self.state, self.tokens = kind(), list[int]()

    def read(self, pending: Sequence[int], path: Sequence[int] = ()) -> torch.Tensor:
        """A pass over pending rows, the nodes of a path and a branch beside them; commits the path.

        Returns:
            the outputs of the rows that are committed.
        """
        self.crop(len(self.tokens))
        first, nodes = self.state.length + len(pending), [*path, *(_BRANCH if path else ())]
        beside = first + len(path)
        parents = [*range(self.state.length - 1, beside - 1),
                   *([first - 1, beside, beside] if path else [])]  # fmt: skip
        self.state.begin(np.array(parents), len(pending))
        outputs = self.state.run(*rows_of(self.state, [*pending, *nodes]))[0]
        self.state.commit(first, torch.arange(first, beside))
        self.tokens += [*pending, *path]
        return outputs[: len(pending) + len(path)]

    def crop(self, length: int) -> None:
        left = self.state.reachable(min(length, len(self.tokens)))
        self.state.crop(left)
        del self.tokens[left:]

    def write(self) -> None:
        """A prompt, two passes with drafts, a turn, which is taken back, and another."""
        for pending, path in ((_TEXT[:6], ()), ([7], [8, 9]), ([10], [11]), (_TEXT[11:16], ())):
            self.read(pending, path)
        self.crop(11)
        self.read([*_TEXT[len(self.tokens) : 17]], [18])


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_whole_wherever_ctrl_c_came(
    kind: Callable[[], RecurrentState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every line of it: outputs and states of what follows are those of a text read at once."""
    for name, rows in {"_TURN_ROWS": 4, "_BEFORE_END": 2, "_EVERY": 3}.items():
        monkeypatch.setattr(recurrent, name, rows)
    Text(kind).write()  # orders of rows are kept
    text, recorded = Text(kind), Interruption()
    with recorded:
        text.write()
    for point in points([site for site in recorded.sites if site[0] == recurrent.__file__]):
        text = Text(kind)
        with pytest.raises(KeyboardInterrupt), Interruption(point):
            text.write()
        for follows in (_TEXT, [*_TEXT[:9], *_BRANCH]):
            same = sum(1 for _ in zip(text.tokens, follows, strict=False))
            same = next((at for at in range(same) if text.tokens[at] != follows[at]), same)
            text.crop(min(same, len(follows) - 1))
            begun, alone = len(text.tokens), Text(kind)
            found, expected = text.read(follows[begun:]), alone.read(follows)
            assert torch.equal(found, expected[begun:]), point
            kept = [each.state.kept_state(len(follows)) for each in (text, alone)]
            assert all(torch.equal(*pair) for pair in zip(*kept, strict=True)), point
