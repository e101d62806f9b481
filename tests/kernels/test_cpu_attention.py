"""Attention against double precision, and a row's bits being its own."""

from __future__ import annotations

import pytest
import torch
from other_cpu import other_cpu
from specexec_kernels import cpu_attention, cpu_jit
from torch import Tensor

HEAD_DIMS = (16, 32, 64, 128, 256)
# heads, key/value heads, rows, slots
SHAPES = ((8, 4, 1, 37), (8, 8, 5, 64), (4, 1, 20, 101), (6, 2, 3, 17))
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def inputs(
    dtype: torch.dtype,
    head_dim: int,
    heads: int,
    kv_heads: int,
    rows: int,
    slots: int,
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, and views of a larger cache's keys and values; a mask that hides some slots."""
    generator = torch.Generator().manual_seed(head_dim + rows)
    queries = torch.randn(heads, rows, head_dim, generator=generator).to(dtype)
    keys, values = (
        torch.randn(kv_heads, slots + 30, size, generator=generator).to(dtype)[:, :slots]
        for size in (head_dim, value_dim or head_dim)
    )
    mask = torch.rand(rows, slots, generator=generator) < 0.7
    mask[:, 0] = True
    return queries, keys, values, mask


def exact(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    group = queries.shape[0] // keys.shape[0]
    scores = queries.double() @ keys.double().repeat_interleave(group, 0).transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += sinks.double().exp()[:, None, None]
    weights /= total
    return (weights @ values.double().repeat_interleave(group, 0)).transpose(0, 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_against_double_precision(dtype: torch.dtype, head_dim: int) -> None:
    for shape in SHAPES:
        queries, keys, values, mask = inputs(dtype, head_dim, *shape)
        assert cpu_attention.supports(keys, values)
        for scale in (None, 0.2):
            found = cpu_attention.attend(queries, keys, values, mask, scale)
            expected = exact(queries, keys, values, mask, scale or head_dim**-0.5)
            assert found.dtype == dtype
            error = (found.double() - expected).abs().max()
            assert error <= TOLERANCE[dtype] * expected.abs().max().clamp(min=1)


# a cap that bends every score, gpt-oss' sinks of two bytes, keys longer than values
FORMS = {
    "cap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "all": {"softcap": 50.0, "sinks": True, "value_dim": 32},
}


def formed(
    form: str, dtype: torch.dtype, heads: int, *shape: int
) -> tuple[tuple[Tensor, ...], tuple[float | None, Tensor | None]]:
    """Queries, keys, values and mask of a form, and its cap and sinks."""
    options = FORMS.get(form, {})
    arguments = inputs(dtype, 64, heads, *shape, value_dim=options.get("value_dim"))
    sinks = torch.linspace(-4, 6, heads).bfloat16() if "sinks" in options else None
    return arguments, (options.get("softcap"), sinks)


@pytest.mark.parametrize("form", FORMS)
def test_forms_against_double_precision(form: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            arguments, options = formed(form, dtype, *shape)
            assert cpu_attention.supports(*arguments[1:3])
            for scale in (64**-0.5, 0.4):
                found = cpu_attention.attend(*arguments, scale, *options)
                expected = exact(*arguments, scale, *options)
                error = (found.double() - expected).abs().max()
                assert error <= TOLERANCE[dtype] * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize(
    ("dtype", "form"),
    [*((dtype, "plain") for dtype in TOLERANCE), *((torch.bfloat16, form) for form in FORMS)],
)
def test_a_row_alone_and_without_what_it_does_not_see_has_the_same_bits(
    dtype: torch.dtype, form: str
) -> None:
    for shape in SHAPES:
        (queries, keys, values, mask), options = formed(form, dtype, *shape)
        together = cpu_attention.attend(queries, keys, values, mask, None, *options)
        for row in range(shape[2]):
            seen = mask[row]
            one, own = queries[:, row : row + 1], (keys[:, seen], values[:, seen])
            alone = cpu_attention.attend(one, *own, seen[None, seen], None, *options)
            assert torch.equal(alone[0], together[row])


def test_soft_capped_scores_are_tanh_to_the_last_places() -> None:
    """Of two slots, one with a score of zero, the share of the other tells its score."""
    scores = torch.cat([torch.logspace(-4, 1.2, 500), -torch.logspace(-4, 1.2, 500)])
    lanes = cpu_jit.lanes()
    queries = torch.zeros(1, len(scores), lanes)
    queries[0, :, 0] = scores
    keys = torch.zeros(1, 2, lanes)
    keys[0, 1, 0] = 1.0
    values = keys.clone()
    mask = torch.ones(len(scores), 2, dtype=torch.bool)
    share = cpu_attention.attend(queries, keys, values, mask, 1.0, 1.0)[:, 0, 0].double()
    found = (share / (1 - share)).log()
    expected = torch.tanh(scores.double())
    # a share is rounded to 2**-24 or so: its logarithm tells a score to four times that
    assert (found - expected).abs().max() < 6e-7


@pytest.mark.parametrize("form", ["plain", "all"])
def test_same_bits_on_any_number_of_threads(form: str) -> None:
    arguments, options = formed(form, torch.float32, 8, 4, 30, 90)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(cpu_attention.attend(*arguments, None, *options))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("lanes", [4, 8])
def test_narrower_vector_registers(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    other_cpu(monkeypatch, lanes=lanes)
    queries, keys, values, mask = inputs(torch.bfloat16, 128, 8, 2, 9, 43)
    found = cpu_attention.attend(queries, keys, values, mask)
    expected = exact(queries, keys, values, mask, 128**-0.5)
    assert (found.double() - expected).abs().max() <= 1.6e-2


@pytest.mark.parametrize("lanes", [4, 8, cpu_jit.lanes()])
def test_nothing_is_read_behind_what_any_row_of_a_tile_sees(
    lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt's chunks: each row sees the prefix and the rows before it."""
    other_cpu(monkeypatch, lanes=lanes)
    rows, prefix, slots = 40, 61, 61 + 40 + 2 * lanes
    queries, keys, values, _ = inputs(torch.float32, 32, 8, 4, rows, slots)
    mask = torch.arange(slots) <= prefix + torch.arange(rows)[:, None]
    shown = [part[:, : prefix + rows] for part in (keys, values)]
    expected = cpu_attention.attend(queries, *shown, mask[:, : prefix + rows])
    for part in (keys, values):
        part[:, prefix + rows + lanes :] = torch.nan  # zero times which would be none
    assert torch.equal(cpu_attention.attend(queries, keys, values, mask), expected)


def test_values_beside_their_keys() -> None:
    """As a latent is expanded: keys and values of a head in one row, [slot][head][both]."""
    queries, keys, values, mask = inputs(torch.float32, 64, 8, 4, 5, 40, 32)
    both = torch.cat([keys, values], 2).transpose(0, 1).contiguous().transpose(0, 1)
    views = both[..., :64], both[..., 64:]
    assert cpu_attention.supports(*views)
    found = cpu_attention.attend(queries, *views, mask)
    assert torch.equal(found, cpu_attention.attend(queries, keys, values, mask))


def test_scores_far_apart() -> None:
    """The exponential of what is far below the largest score is zero, of the largest one."""
    queries, keys, values, mask = inputs(torch.float32, 16, 2, 1, 4, 40)
    found = cpu_attention.attend(queries * 1e4, keys, values, torch.ones_like(mask))
    best = (queries @ keys.transpose(1, 2)).argmax(-1)  # (heads, rows)
    assert torch.equal(found, values[0][best].transpose(0, 1))


def test_what_is_not_read_in_place_is_copied() -> None:
    """Other dtypes, dimensions that fill no vector or lie apart, and heads of any size."""
    queries, keys, values, mask = inputs(torch.float32, 16, 8, 4, 5, 40)
    short = [part[..., :6] for part in (queries, keys, values)]
    cases = [
        (queries, keys.double(), values.double()),
        (queries, keys, values.half()),
        (*short,),
        (queries, keys, torch.stack([values, values], -1)[..., 0]),
        (queries, keys, values[..., :9]),
    ]
    for own, *both in cases:
        assert not cpu_attention.supports(*both)
        found = cpu_attention.attend(own, *both, mask)
        expected = exact(own, *both, mask, own.shape[2] ** -0.5)
        assert found.shape == expected.shape
        assert (found.double() - expected).abs().max() < 4e-6
    assert not cpu_attention.supports(keys.to("meta"), keys.to("meta"))
    wide = inputs(torch.float32, 64 * cpu_jit.lanes(), 2, 1, 3, 20)
    assert cpu_attention.supports(*wide[1:3])
    error = cpu_attention.attend(*wide).double() - exact(*wide, wide[0].shape[2] ** -0.5)
    assert error.abs().max() < 4e-6


@pytest.mark.parametrize("head_dim", [6, 24])
def test_a_row_of_short_heads_has_the_same_bits_alone(head_dim: int) -> None:
    queries, keys, values, mask = inputs(torch.bfloat16, head_dim, 8, 4, 5, 40)
    together = cpu_attention.attend(queries, keys, values, mask)
    for row in range(5):
        seen = mask[row]
        one, own = queries[:, row : row + 1], (keys[:, seen], values[:, seen])
        assert torch.equal(cpu_attention.attend(one, *own, seen[None, seen])[0], together[row])
