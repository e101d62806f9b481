"""Hundreds of drawn passes over every type with recurrent layers write what plain decoding writes.

Each pass is drawn: pending rows, a tree below them, the path that is accepted (often none, the root
alone), rows of a chunk, threads; whether it is interrupted in a layer and done again, whether
another text shares it, whether the text is cropped behind it, and which of five texts then follows.
The logits on the accepted path and, behind each commit, all that the layers keep must have the bits
of a run with one row a pass. That is the dear part, so each of the five texts is run so once, and
what they have in common once for all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor

from specexec_cli.core import DraftTree
from specexec_cli.models import recurrent
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.verify.verifier import LocalTarget, verify_together

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from conformance_bits import on_threads
from conformance_check import save
from conformance_configs import NO_OPTIONS, WORDS

TYPES = (
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "nemotron_h",
    "granitemoehybrid", "falcon_h1", "bamba", "zamba2", "lfm2", "lfm2_moe", "kimi_linear",
    "glm5_next", "mamba2", "mamba", "falcon_mamba", "jamba",
)  # fmt: skip
_DRAWS = 100  # passes in each dtype
_LENGTH = 48  # tokens of each text
_PARTS = (6, 12, 20, 30)  # tokens with which the other texts begin as the first does
_LONGEST = 32  # tokens behind which a text is cropped
_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}  # of 16 and 32 in real models


class Interrupted(Exception):
    """What a pass is ended by."""


class Plain:
    """What plain decoding makes of a text, read once with one row a pass."""

    def __init__(self, model: StreamedModel, tokens: Sequence[int]) -> None:
        self.model, self.tokens = model, tokens
        self.logits: list[Tensor] = []  # behind each token
        self.kept: list[list[list[Tensor]]] = [[]]  # of each layer, at each length
        self._target = LocalTarget(model)

    def read(self, length: int) -> None:
        """Goes on until so many tokens have been read."""
        for token in self.tokens[len(self.logits) : length]:
            self.logits.append(self._target.verify([token], DraftTree.empty()))
            self._target.commit([])
            self.kept.append(_kept(self._target.state))

    def parting(self, tokens: Sequence[int]) -> Plain:
        """Another text, which parts from this one where it has been read to."""
        other = Plain(self.model, tokens)
        other._target.copy_rows(self._target, len(self.logits))
        assert other._target.tokens == tokens[: len(self.logits)]
        for found, plain in zip(_kept(other._target.state), self.kept[-1], strict=True):
            assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))
        other.logits, other.kept = [*self.logits], [*self.kept]
        return other


class Text:
    """One of five texts that begin alike, read in drawn passes."""

    def __init__(self, model: StreamedModel, seed: Sequence[int]) -> None:
        self.model = model
        self.draws = np.random.default_rng(seed)
        self.target = LocalTarget(model)
        first = self.words(_LENGTH)
        others = [[*first[:part], *self.words(_LENGTH - part)] for part in _PARTS]
        self.plain = Plain(model, first)
        self.texts = [self.plain]
        with on_threads(1):
            for part, tokens in zip(_PARTS, others, strict=True):
                self.plain.read(part)
                self.texts.append(self.plain.parting(tokens))
            for text in self.texts:
                text.read(_LENGTH)

    def words(self, count: int) -> list[int]:
        found: list[int] = self.draws.integers(WORDS.start, WORDS.stop, count).tolist()
        return found

    def chance(self, share: float) -> bool:
        return bool(self.draws.random() < share)

    def tree(self) -> DraftTree:
        count = int(self.draws.integers(0, 10))
        parents = [int(self.draws.integers(-1, node)) for node in range(count)]
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return DraftTree(
            np.array(self.words(count), np.int64), np.array(parents, np.int64),
            np.array(depths, np.int64), np.zeros(count),
        )  # fmt: skip

    def path(self, tree: DraftTree, most: int) -> list[int]:
        """Nodes that a target might accept: a path from the root, or none.

        Args:
            most: nodes that the path has at most.
        """
        node = int(self.draws.integers(-1, len(tree))) if self.chance(0.75) else -1
        found: list[int] = []
        while node >= 0:
            found.insert(0, node)
            node = int(tree.parents[node])
        return found[:most]

    def drawn_pass(self) -> None:
        """One pass and what follows on it."""
        begun, tokens = len(self.target.tokens), self.plain.tokens
        root = begun + (1 if self.chance(0.6) else int(self.draws.integers(2, 12)))
        tree = self.tree()
        path = self.path(tree, _LENGTH - root)
        tree.tokens[path] = tokens[root : root + len(path)]
        self.model.context.chunk_rows = int(self.draws.choice([3, 5, 16, 512]))
        with on_threads(int(self.draws.integers(1, 4))):
            if self.chance(0.15):
                self.interrupted(tokens[begun:root], tree)
            logits = self.verified(tokens[begun:root], tree)
            self.target.commit(path)
        expected = torch.cat(self.plain.logits[root - 1 : root + len(path)])
        assert torch.equal(logits[[0, *(node + 1 for node in path)]], expected)
        self.check()
        if len(self.target.tokens) > _LONGEST or self.chance(0.15):
            self.crop()

    def interrupted(self, pending: Sequence[int], tree: DraftTree) -> None:
        """A pass that ends in some layer; the text is as before it."""
        last, before = int(self.draws.integers(0, len(self.model.layers))), [*self.target.tokens]

        def end(layer: int) -> None:
            if layer == last:
                raise Interrupted

        self.model.on_layer = end
        with pytest.raises(Interrupted):
            self.target.verify(pending, tree)
        self.model.on_layer = lambda layer: None
        assert self.target.tokens == before

    def verified(self, pending: Sequence[int], tree: DraftTree) -> Tensor:
        if not self.chance(0.15):
            return self.target.verify(pending, tree)
        others, other_tree = self.words(4), self.tree()
        other = LocalTarget(self.model)
        found, theirs = verify_together([(self.target, pending, tree), (other, others, other_tree)])
        assert torch.equal(theirs, LocalTarget(self.model).verify(others, other_tree))
        return found

    def crop(self) -> None:
        """Cuts the text, as an undone turn does; recurrent layers may go back farther.

        What comes behind it is another text where one begins so, and at once other tokens than
        before where one parts there: nothing of what was cut may be left.
        """
        length = min(len(self.target.tokens), _LONGEST)
        parts = [part for part in map(self.shared, self.texts) if part <= length]
        wanted = int(self.draws.choice([int(self.draws.integers(0, length + 1)), *parts]))
        self.target.crop(wanted)
        length = len(self.target.tokens)
        assert length <= wanted
        self.check()
        follow = [text for text in self.texts if length <= self.shared(text) < _LENGTH]
        part_here = [text for text in follow if self.shared(text) == length]
        if follow:
            self.plain = (part_here or follow)[int(self.draws.integers(len(part_here or follow)))]

    def shared(self, text: Plain) -> int:
        """Tokens with which a text begins as the present one does."""
        pairs = zip(text.tokens, self.plain.tokens, strict=True)
        return next((at for at, (one, two) in enumerate(pairs) if one != two), _LENGTH)

    def check(self) -> None:
        """The text is the plain one so far, and all that the layers keep has its bits."""
        length = len(self.target.tokens)
        assert self.target.tokens == self.plain.tokens[:length]
        assert self.target.state.length == length
        if not length:
            return
        for found, plain in zip(_kept(self.target.state), self.plain.kept[length], strict=True):
            assert len(found) == len(plain)
            assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))


def _kept(state: ModelState) -> list[list[Tensor]]:
    """All that each layer keeps of a committed text."""
    found: list[list[Tensor]] = []
    for layer in state.layers:
        rows = [part.clone() for part in layer.kept_rows(0, layer.length)]
        found.append([*rows, *layer.kept_state(layer.length)])
    return found


@pytest.mark.parametrize("model_type", TYPES)
def test_they_are_those_of_plain_decoding(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as many checkpoints in a few rows as usually in thousands
    for name, rows in {"_TURN_ROWS": 4, "_BEFORE_END": 2, "_EVERY": 6}.items():
        monkeypatch.setattr(recurrent, name, rows)
    options = _HEADS if model_type.startswith("qwen3") else NO_OPTIONS
    save(model_type, tmp_path, noise=0.0, options=options, widen=8)  # heads of 64, as kernels take
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        spec = ModelSpec(device=torch.device("cpu"), dtype=dtype, tiers=("ram", None)[number])
        model = spec.open(read_checkpoint(tmp_path))
        text = Text(model, [crc32(model_type.encode()), number])
        for _ in range(_DRAWS):
            text.drawn_pass()
        model.close()
