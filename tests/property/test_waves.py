"""How the rows of a pass are divided into the waves that go through several machines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specexec_cli.core import DraftTree
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.planning.hosts import in_waves
from specexec_cli.verify.masks import verification_rows

texts = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 150)), min_size=1, max_size=6)


def rows_of(pending: int, nodes: int) -> PassRows:
    return verification_rows([1] * pending, DraftTree.chain([2] * nodes), 7)


@given(texts, st.integers(1, 300))
def test_waves_have_every_row_once_and_in_order(parts: list[tuple[int, int]], size: int) -> None:
    waves = in_waves([(sum(part), part[0]) for part in parts], size)
    found = [
        (piece.text, row)
        for wave in waves
        for piece in wave
        for row in range(piece.start, piece.stop)
    ]
    assert found == [(text, row) for text, part in enumerate(parts) for row in range(sum(part))]
    for wave in waves:
        assert wave
        assert len({piece.text for piece in wave}) == len(wave)


@given(texts, st.integers(1, 300))
def test_a_tree_is_in_one_wave_with_its_root(parts: list[tuple[int, int]], size: int) -> None:
    for wave in in_waves([(sum(part), part[0]) for part in parts], size):
        for piece in wave:
            pending, nodes = parts[piece.text]
            assert piece.stop <= pending - 1 or piece.stop == pending + nodes
            assert piece.start <= pending - 1


@given(texts, st.integers(1, 300))
def test_waves_are_about_as_large_as_asked(parts: list[tuple[int, int]], size: int) -> None:
    waves = in_waves([(sum(part), part[0]) for part in parts], size)
    largest_tree = max(nodes for _, nodes in parts) + 1
    for wave in waves:
        assert sum(piece.count for piece in wave) < 2 * size + largest_tree
    assert len(waves) <= 2 * (sum(map(sum, parts)) // size + 1) + len(parts)


@given(st.integers(1, 60), st.integers(0, 20), st.data())
def test_a_part_of_a_texts_rows_is_a_pass_behind_the_others(
    pending: int, nodes: int, data: st.DataObject
) -> None:
    whole = rows_of(pending, nodes)
    start = data.draw(st.integers(0, pending - 1))
    before, after = whole.part(0, start), whole.part(start, pending + nodes)
    for part, first in ((before, 0), (after, start)):
        count = len(part.tokens)
        assert part.prefix_len == whole.prefix_len + first
        assert [*part.tokens] == [*whole.tokens][first : first + count]
        assert [*part.positions] == [*whole.positions][first : first + count]
        assert part.parents.tolist() == whole.parents[first : first + count].tolist()
        seen = whole.mask(first, first + count, 9)
        assert (
            part.mask(0, count, 9).tolist() == seen[..., : part.mask(0, count, 9).shape[3]].tolist()
        )
        assert not seen[..., part.mask(0, count, 9).shape[3] :].any()
