"""Draws random prompts for training, validation and tests, from a dataset's own splits if any.

Source: DISCO, arXiv:2405.04304, appendix B and table 3. MBPP and CNN-DM have all three splits.
HumanEval has none for training. Alpaca has only one split, of which disjoint parts are taken.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from specexec_cli.errors import ConfigError
from specexec_cli.lab.bench.adapters import ADAPTERS, Prompt
from specexec_cli.lab.bench.datasets import Dataset, load_dataset

PARTS = ("train", "validation", "test")
Counts = tuple[int, int, int]  # number of prompts in each part

_EVERY = 1 << 20
# MBPP's splits by task number: README of google-research/mbpp; tasks 1 to 10 serve as examples
_MBPP = {"train": range(601, 975), "validation": range(511, 601), "test": range(11, 511)}


def load_parts(
    reference: str, *, data_folder: Path, counts: Counts, seed: int, at_most: bool = False
) -> dict[str, Dataset]:
    """Draws the parts of a dataset, by the names of PARTS.

    Args:
        reference: NAME, FILE or NAME=FILE, as in load_dataset.
        counts: number of prompts in each part; a part of 0 is empty.
        seed: equal seeds choose equal prompts.
        at_most: whether fewer prompts are no error. A dataset with splits then gives what each
            split has; one without gives all its prompts, in the proportions of `counts`.
    Raises:
        ConfigError: as in load_dataset, or if there are too few prompts.
    """
    pools, source, name = _pools(reference, data_folder, counts, seed)
    found = {}
    shuffled = {id(pool): random.Random(seed).sample(pool, len(pool)) for pool in pools.values()}
    if at_most:
        available = [len(pools[part]) for part in PARTS]
        train, validation, test = map(min, counts, available)
        # parts that share one pool keep their proportions
        counts = scaled(counts, available[0]) if len(shuffled) == 1 else (train, validation, test)
    for part, count in zip(PARTS, counts, strict=True):
        pool = shuffled[id(pools[part])]  # may be shared, so taken prompts are removed below
        if len(pool) < count:
            raise ConfigError(
                f"dataset {name} has {len(pool)} prompts left for its part '{part}', not {count}"
            )
        found[part] = Dataset(name, source, tuple(pool[:count]))
        del pool[:count]
    return found


def _pools(
    reference: str, data_folder: Path, counts: Counts, seed: int
) -> tuple[Mapping[str, list[Prompt]], str, str]:
    """The pool of prompts for each part, their source, and the dataset's name."""
    adapter = ADAPTERS.get(reference)
    on_hub = adapter is not None and not any(
        (data_folder / file).is_file() for file in adapter.files
    )
    if adapter is not None and on_hub and adapter.parts:
        own = {
            part: load_dataset(
                reference, data_folder=data_folder, count=count, part=part, seed=seed
            )
            for part, count in zip(PARTS, counts, strict=True)
            if count
        }
        pools = {part: list(own[part].prompts) if part in own else [] for part in PARTS}
        one = next(iter(own.values()))
        return pools, one.source, one.name
    whole = load_dataset(
        reference, data_folder=data_folder, count=sum(counts) if on_hub else _EVERY,
        seed=seed if on_hub else None,
    )  # fmt: skip
    if whole.name == "mbpp" and (parts := _by_task(whole.prompts)):
        return parts, whole.source, whole.name
    pool = list(whole.prompts)
    return dict.fromkeys(PARTS, pool), whole.source, whole.name


def _by_task(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]] | None:
    """MBPP's own splits; None if a split has no prompts in this file."""
    parts = {
        part: [prompt for prompt in prompts if prompt.id.isdigit() and int(prompt.id) in tasks]
        for part, tasks in _MBPP.items()
    }
    return parts if all(parts.values()) else None


def scaled(counts: Counts, most: int) -> Counts:
    """Scales the counts down, in the same proportions, to at most `most` prompts together."""
    total = sum(counts)
    if most >= total:
        return counts
    validation, test = (count * most // total for count in counts[1:])
    return (most - validation - test if counts[0] else 0), validation, test
