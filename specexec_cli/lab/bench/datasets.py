"""Loads prompts by dataset name or from a file; adapters turn records into prompts.

`--dataset NAME` looks for the dataset's usual file in the data folder, then asks the `datasets`
package. `--dataset NAME=FILE` reads a file as that dataset. `--dataset FILE` reads any file of
texts, [id, text] pairs, or objects with a usual field.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from specexec_cli.errors import ConfigError, nearest
from specexec_cli.lab.bench.adapters import ADAPTERS, Adapter, Prompt, RecordError, any_record
from specexec_cli.lab.bench.records import read_records

BUILT_IN = "demo"
DATASET_NAMES = (BUILT_IN, *ADAPTERS)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prompts and their source."""

    name: str
    source: str  # file or hub id
    prompts: tuple[Prompt, ...]

    @property
    def sha256(self) -> str:
        """A digest of ids and messages; only results with equal digests are compared."""
        content = [[prompt.id, prompt.chat, prompt.messages] for prompt in self.prompts]
        return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()


def load_dataset(
    reference: str,
    *,
    data_folder: Path,
    count: int,
    part: str | None = None,
    seed: int | None = None,
) -> Dataset:
    """Loads prompts of a dataset: the first `count`, or `count` at random.

    A dataset on the hub is streamed, not downloaded completely.

    Args:
        reference: NAME, FILE or NAME=FILE.
        data_folder: the folder in which a NAME's file is looked for.
        part: split of a dataset on the hub; None is the adapter's.
        seed: None takes the first prompts. With a seed all prompts are equally likely; those of a
            hub's dataset only within a buffer of 10,000 rows.
    Raises:
        ConfigError: the dataset is unknown, missing, empty or malformed; the message has the line.
    """
    name, equals, file = reference.partition("=")
    if equals and name in ADAPTERS:
        return _from_file(name, Path(file).expanduser(), ADAPTERS[name].adapt, count, seed)
    if reference == BUILT_IN:
        return _built_in(count, seed)
    if reference in ADAPTERS:
        return _by_name(ADAPTERS[reference], data_folder, count, part, seed)
    path = Path(reference).expanduser()
    if path.is_file():
        return _from_file(path.name, path, any_record, count, seed)
    if path.suffix or "/" in reference:
        raise ConfigError(f"no dataset file {reference}")
    hint = nearest(reference, list(DATASET_NAMES))
    raise ConfigError(
        f"unknown dataset '{reference}': neither a file nor one of "
        f"{', '.join(DATASET_NAMES)}.{hint}"
    )


def _built_in(count: int, seed: int | None) -> Dataset:
    """Prompts that the demo pair was not trained on; code and questions alternate."""
    path = Path(__file__).parents[2] / "demo" / "heldout_prompts.json"
    prompts = list(_adapted(read_records(path), any_record))
    kinds = ([p for p in prompts if not p.chat], [p for p in prompts if p.chat])
    ordered = [kind[i] for i in range(len(prompts)) for kind in kinds if i < len(kind)]
    return Dataset(BUILT_IN, "built in", tuple(_chosen(iter(ordered), count, seed)))


def _by_name(
    adapter: Adapter, data_folder: Path, count: int, part: str | None, seed: int | None
) -> Dataset:
    for file in adapter.files:
        if (data_folder / file).is_file():
            return _from_file(adapter.name, data_folder / file, adapter.adapt, count, seed)
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"dataset '{adapter.name}' is not in {data_folder} (looked for "
            f"{', '.join(adapter.files)}) and the package 'datasets' is not installed. Name its "
            f"file, `dataset='{adapter.name}=FILE'`, or its folder, `data`, or install it: "
            "pip install datasets"
        ) from error
    try:
        rows = datasets.load_dataset(*adapter.hub, split=part or adapter.split, streaming=True)
        if seed is not None:
            rows = rows.shuffle(seed=seed, buffer_size=10_000)
    except Exception as error:  # the package may raise any error of the hub, a disk or a script
        raise ConfigError(f"cannot load dataset '{adapter.name}' from the hub: {error}") from error
    source = f"hub: {'/'.join(adapter.hub)}"
    records = ((f"{source}, row {number}", row) for number, row in enumerate(rows, start=1))
    return _nonempty(adapter.name, source, _chosen(_adapted(records, adapter.adapt), count, None))


def _from_file(name: str, path: Path, adapt: Any, count: int, seed: int | None) -> Dataset:
    if not path.is_file():
        raise ConfigError(f"no dataset file {path}")
    prompts = _adapted(read_records(path), adapt)
    return _nonempty(name, str(path), _chosen(prompts, count, seed))


def _adapted(records: Iterable[tuple[str, Any]], adapt: Any) -> Iterator[Prompt]:
    for number, (where, record) in enumerate(records):
        try:
            prompt = adapt(record, number)
        except RecordError as error:
            raise ConfigError(f"{where}: {error}") from error
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            found = ", ".join(record) if isinstance(record, Mapping) else type(record).__name__
            raise ConfigError(f"{where}: not a record of this dataset (found: {found})") from error
        if prompt is not None:
            yield prompt


def _chosen(prompts: Iterator[Prompt], count: int, seed: int | None) -> list[Prompt]:
    """The first `count` prompts, or `count` random ones with a seed; all if there are fewer."""
    if seed is None:
        return list(islice(prompts, count))
    every = list(prompts)
    return random.Random(seed).sample(every, min(count, len(every)))


def _nonempty(name: str, source: str, prompts: list[Prompt]) -> Dataset:
    if not prompts:
        raise ConfigError(f"dataset {name} ({source}) holds no prompt")
    return Dataset(name, source, tuple(prompts))
