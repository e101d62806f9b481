"""One models.toml file: its entries, and the checks that name file, entry and key of a mistake.

It knows nothing of other files (registry.py merges them) and opens no checkpoint.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from os.path import isabs
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from platformdirs import user_cache_path

from specexec_cli.catalog.architectures import text_config
from specexec_cli.catalog.weight_counts import WeightCounts, counts_of
from specexec_cli.config import DTYPE_BYTES, TreeConfig
from specexec_cli.errors import ConfigError, nearest
from specexec_cli.gguf.container import part_names
from specexec_cli.guarded import parse_toml, read_toml
from specexec_cli.kept import read_json, write_json

_KEPT_BYTES = range(50_000, 1_000_000)  # of files whose content is kept as JSON

PACKAGE_PREFIX = "package:"

_TREE = TreeConfig()

# The tasks of pairs; "text" is for base models, which continue a text without a chat template.
TASKS = ("chat", "code", "text")
_CHOICES: dict[str, tuple[object, ...]] = {
    "dtype": tuple(DTYPE_BYTES),
    "quantization": ("none", "gptq", "awq", "compressed-tensors", "mxfp4", "fp8"),
    "bits": (2, 3, 4, 8),
}
_SHAPE_KEYS = (
    "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "attention_bias",
    "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "n_routed_experts", "n_shared_experts", "first_k_dense_replace", "kv_lora_rank", "q_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "multi_query",
    "intermediate_size_mlp", "interleave_moe_layer_step", "layer_types", "global_head_dim",
    "num_global_key_value_heads", "attention_k_eq_v", "hidden_size_per_layer_input",
    "vocab_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp",
    "enable_moe_block", "top_k_experts", "shared_expert_intermediate_size",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "shared_intermediate_size", "mamba_n_heads",
    "mamba_d_head", "mamba_n_groups", "mamba_d_ssm", "mamba_d_state", "mamba_d_conv",
    "mamba_expand",
    "layers_block_type", "moe_shared_expert_intermediate_size", "mamba_num_heads",
    "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "num_dense_layers",
    "conv_L_cache",
)  # fmt: skip
_KINDS_OF_LAYERS = ("layer_types", "layers_block_type")
_COUNTED_BY = ("model_type", *_SHAPE_KEYS)
_MAY_BE_ZERO = (
    "q_lora_rank", "hidden_size_per_layer_input", "num_kv_shared_layers", "num_local_experts",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One [models.NAME], or the little known of a bare folder or hub id (None: unknown)."""

    name: str
    repo: str  # hub id, folder, or package:FOLDER for weights shipped with the program
    revision: str | None = None  # branch, tag or commit of the hub repository
    file: str | None = None  # one GGUF file of the hub repository, or any part of a split one
    model_type: str | None = None  # as in config.json; of a vision model, that of its text part
    dtype: str | None = None  # of the stored weights that are not quantized
    quantization: str | None = None  # one of _CHOICES; mxfp4 packs the experts alone
    bits: int | None = None  # of a quantized weight
    group_size: int | None = None  # inputs that share a scale; -1 is all of them
    context: int | None = None  # tokens
    params: int | None = None
    vision_params: int | None = None  # beside `params`: fetched, not run (pictures, more tokens)
    chat: bool | None = None  # the tokenizer has a chat template
    tokenizer: str | None = None  # family: models of one family can be paired
    license: str | None = None
    gated: bool = False  # the hub asks for a login and an accepted licence
    superseded: bool = False  # newer models of its size or less write better
    note: str = ""
    shape: Mapping[str, Any] = field(default_factory=dict)  # config.json's own keys
    counted: Mapping[str, Any] = field(default_factory=dict)  # see weight_counts.counts_of

    @property
    def folder(self) -> Path | None:
        """The folder, or the GGUF file, of the checkpoint; None when it lives on the hub."""
        if self.repo.startswith(PACKAGE_PREFIX):
            return Path(__file__).parents[1] / self.repo.removeprefix(PACKAGE_PREFIX)
        return Path(self.repo).expanduser() if is_path(self.repo) else None

    @property
    def weights(self) -> str:
        """The identity of these weights: the repo, or org/name:FILE.gguf for one file of it.

        Measurements of a model belong under this name.
        """
        return self.repo if self.file is None else f"{self.repo}:{self.file}"

    @property
    def dense_params(self) -> int:
        """Weights of a dense model that would write about as well; 0 if they are not known.

        Of a mixture that is the geometric mean of all weights and of those that a token meets, a
        rule of thumb of those who train them.
        """
        if self.params is None or not self.counted:
            return self.params or 0
        counts = _known_counts(self.counted)
        idle = sum(
            kind.params - kind.active_params(counts.experts, counts.chosen)
            for kind in counts.layers
        )
        return math.isqrt(self.params * (self.params - idle))

    def at(self, revision: str) -> ModelEntry:
        """The same repository at another branch, tag or commit.

        Its weights may be quantized in another way, so nothing said about them carries over.

        Raises:
            ConfigError: the entry is a local folder.
        """
        if self.folder is not None:
            raise ConfigError(f"`revision` is for hub ids, but '{self.name}' is a local folder")
        if revision == self.revision:
            return self
        return ModelEntry(
            name=self.name,
            repo=self.repo,
            revision=revision,
            file=self.file,
            tokenizer=self.tokenizer,
            gated=self.gated,
        )

    @property
    def size_bytes(self) -> int | None:
        """Bytes of the weights: those of the files in a folder, else computed; None if not known.

        A computed size is within 1 % of the files' on the hub.
        """
        if self.folder is not None:
            return sum(file.stat().st_size for file in weight_files(self.folder)) or None
        if self.dtype is None:
            return None
        width, quantization = DTYPE_BYTES[self.dtype], self._quantization_config()
        # of parts that are not run, only fp8 quantizes the weights
        unread = (self.vision_params or 0) * (1 if self.quantization == "fp8" else width)
        if (counts := self.counts()) is not None:
            return counts.total_bytes(width, quantization) + unread
        if self.params is None:
            return None
        return self.params * (self.bits or 8 * width) // 8 + unread

    def counts(self, config: Mapping[str, Any] | None = None) -> WeightCounts | None:
        """The weights as they were counted for models.toml; None where they were not.

        Args:
            config: the checkpoint's own config.json, where it is here. None is returned if it
                contradicts the entry: then the entry describes another model.
        Raises:
            ConfigError: what the entry has as `counted` is something else.
        """
        if not self.counted:
            return None
        if config is not None:
            stored, own = text_config(config), self.config_json()
            if any(stored.get(key, own[key]) != own[key] for key in own if key in _COUNTED_BY):
                return None
        try:
            return _known_counts(self.counted)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ConfigError(
                f"[models.{self.name}] counted is not as scripts/count_sizes.py writes it: leave "
                "it out, and the model is counted when it is needed"
            ) from error

    def config_json(self) -> dict[str, Any]:
        """The part of the checkpoint's config.json that decides its size; empty if unknown."""
        if not self.shape:
            return {}
        config: dict[str, Any] = {"model_type": self.model_type, "dtype": self.dtype, **self.shape}
        if config.get("q_lora_rank") == 0:
            config["q_lora_rank"] = None  # TOML has no null
        if quantization := self._quantization_config():
            config["quantization_config"] = quantization
        return config

    def _quantization_config(self) -> dict[str, Any]:
        """config.json's quantization_config; empty where nothing is quantized."""
        if self.quantization in (None, "none"):
            return {}
        if self.quantization == "fp8":
            block = [self.group_size, self.group_size]
            return {"quant_method": "fp8", "weight_block_size": block}
        if self.quantization != "compressed-tensors":
            return {
                "quant_method": self.quantization,
                "bits": self.bits,
                "group_size": self.group_size,
            }
        weights: dict[str, Any] = {"num_bits": self.bits, "type": "int", "symmetric": True}
        if self.group_size == -1:
            weights["strategy"] = "channel"
        else:
            weights |= {"strategy": "group", "group_size": self.group_size}
        return {
            "quant_method": self.quantization,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEntry:
    """One [pairs.NAME]: a target, its draft model, and the tree recommended for them."""

    name: str
    target: str  # a model name, folder or hub id
    draft: str  # a model with the target's tokenizer, or SUFFIX if there is no small one
    budget: int = _TREE.budget
    depth: int = _TREE.max_depth
    batch: int = _TREE.batch
    source: str = "not stated"  # where the recommendation comes from
    tokens_per_pass: float | None = None  # committed tokens, with this tree; None: not known
    tasks: tuple[str, ...] = ()  # from TASKS: `models recommend` may recommend it for these
    note: str = ""

    def __post_init__(self) -> None:
        self.tree  # noqa: B018  TreeConfig checks the three numbers

    @property
    def tree(self) -> TreeConfig:
        """The recommended draft tree."""
        return TreeConfig(budget=self.budget, max_depth=self.depth, batch=self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadEntry:
    """One [heads.NAME]: a trained head with files of its own, which drafts for one target."""

    name: str
    target: str  # a model name, folder or hub id
    repo: str  # hub id or folder
    params: int | None = None  # None: not known, as what follows
    license: str | None = None
    source: str = "not stated"  # where these facts come from

    @property
    def model(self) -> ModelEntry:
        """The head as a model to fetch and to open."""
        return ModelEntry(name=self.name, repo=self.repo, params=self.params, license=self.license)


@dataclass(frozen=True, slots=True, eq=False)
class ModelsFile:
    """The entries of one file, in the file's order; each reading of a file equals itself alone."""

    models: Mapping[str, ModelEntry]
    pairs: Mapping[str, PairEntry]
    names: Mapping[str, str]  # other names of models: each name with the word it stands for
    use: str | None  # the model that commands take where none is named
    heads: Mapping[str, HeadEntry] = field(default_factory=dict)


def read_models_file(path: Path) -> ModelsFile:
    """Read and check one models.toml; one that has not changed is not parsed again.

    Raises:
        ConfigError: not readable, not TOML (with the line), or an entry that is not right.
    """
    try:
        status = path.stat()
        return _parsed(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ConfigError(f"cannot read the models file {path}: {error.strerror}") from error


def _kept_table(path: Path) -> dict[str, Any]:
    """The table of a large file, parsed once: JSON is read in a fifth of the time that TOML takes.

    It is kept in the cache folder under a hash of the file's bytes.
    """
    raw = path.read_bytes()
    name = hashlib.sha256(raw).hexdigest()[:32]
    kept = user_cache_path("specexec", appauthor=False) / "models" / f"{name}.json"
    with suppress(ValueError):  # it is missing or damaged
        if isinstance(table := read_json(kept), dict):
            return table
    table = parse_toml(raw)
    with suppress(OSError, TypeError):  # works without the cache, and where a value is a date
        write_json(kept, table)
        for other in kept.parent.glob("*.json"):  # of what the file said before
            if other != kept:
                other.unlink()
    return table


@lru_cache(maxsize=8)
def _parsed(path: Path, mtime_ns: int, size: int) -> ModelsFile:
    """The entries of a file; after a change its time or size differs, and it is parsed again."""
    try:
        table = _kept_table(path) if size in _KEPT_BYTES else read_toml(path)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return entries_of_table(table, path)


def entries_of_table(table: dict[str, Any], path: Path) -> ModelsFile:
    """The entries of a file whose TOML is this table.

    Raises:
        ConfigError: an entry is not right.
    """
    _reject_unknown(table, ("models", "pairs", "heads", "names", "use"), f"{path}:")
    models = {
        name: _model(name, entry, path, f"{path}: [models.{name}]")
        for name, entry in _tables(table, "models", path).items()
    }
    pairs = {
        name: _pair(name, entry, path, f"{path}: [pairs.{name}]")
        for name, entry in _tables(table, "pairs", path).items()
    }
    heads = {
        name: _head(name, entry, path, f"{path}: [heads.{name}]")
        for name, entry in _tables(table, "heads", path).items()
    }
    names = {
        name: _word(word, path, f"{path}: [names] {name}")
        for name, word in _tables(table, "names", path).items()
    }
    for name, word in names.items():
        if word in names:
            raise ConfigError(f"{path}: [names] {name}: '{word}' is such a name itself")
    use = _word(table["use"], path, f"{path}: use") if "use" in table else None
    return ModelsFile(models, pairs, names, use, heads)


# Counts that were read of an entry's table, with the table itself: another has another identity.
_COUNTS: dict[int, tuple[Mapping[str, Any], WeightCounts]] = {}
_MOST_COUNTS = 500


def _known_counts(table: Mapping[str, Any]) -> WeightCounts:
    """counts_of, once for each table: `models list` asks five times."""
    known = _COUNTS.get(id(table))
    if known is None:
        if len(_COUNTS) >= _MOST_COUNTS:
            _COUNTS.clear()
        known = _COUNTS[id(table)] = table, counts_of(table)
    return known[1]


# Weights that torch.save wrote in one file, which some trained heads are published as alone.
TORCH_FILE = "pytorch_model.bin"


def weight_files(place: Path) -> list[Path]:
    """The weight files in a checkpoint's folder, or all parts of a GGUF file that are there."""
    if place.is_file():
        parts = [place.parent / name for name in part_names(place.name)]
        return [part for part in parts if part.is_file()]
    torch_file = place / TORCH_FILE
    return list(place.glob("*.safetensors")) or [torch_file] * torch_file.is_file()


def is_path(reference: str) -> bool:
    """Whether a reference is spelled as a path: absolute, or beginning with . or ~."""
    return reference.startswith((".", "~")) or isabs(reference)


def _tables(table: dict[str, Any], section: str, path: Path) -> dict[str, Any]:
    entries = table.get(section, {})
    if not isinstance(entries, dict):
        raise ConfigError(f"{path}: '{section}' must hold entries such as [{section}.NAME]")
    return entries


def _model(name: str, table: object, path: Path, where: str) -> ModelEntry:
    entry = _entry(ModelEntry, name, table, ("repo",), where)
    _reject_unknown(entry.shape, _SHAPE_KEYS, f"{where} shape:")
    for key, value in entry.shape.items():
        if key in _KINDS_OF_LAYERS:
            if not (isinstance(value, list) and all(isinstance(kind, str) for kind in value)):
                raise ConfigError(f"{where} shape: {key} must be a list of texts, not {value!r}")
            continue
        least = 0 if key in _MAY_BE_ZERO else 1
        if not isinstance(value, bool) and not (isinstance(value, int) and value >= least):
            raise ConfigError(f"{where} shape: {key} must be a whole number above 0, not {value!r}")
    in_groups = entry.quantization in ("gptq", "awq", "compressed-tensors", "fp8")
    stated = {in_groups, bool(entry.bits), bool(entry.group_size)}
    if len(stated) > 1:
        raise ConfigError(f"{where} needs quantization, bits and group_size together, or no bits")
    return replace(entry, repo=_anchored(entry.repo, path))


def _pair(name: str, table: object, path: Path, where: str) -> PairEntry:
    entry = _entry(PairEntry, name, table, ("target", "draft"), where)
    return replace(entry, target=_anchored(entry.target, path), draft=_anchored(entry.draft, path))


def _head(name: str, table: object, path: Path, where: str) -> HeadEntry:
    entry = _entry(HeadEntry, name, table, ("target", "repo"), where)
    return replace(entry, target=_anchored(entry.target, path), repo=_anchored(entry.repo, path))


def _word(word: object, path: Path, where: str) -> str:
    if not isinstance(word, str) or not word:
        raise ConfigError(f"{where} must be a model's name, path or hub id, not {word!r}")
    return _anchored(word, path)


def _anchored(reference: str, path: Path) -> str:
    """The reference; a relative path becomes absolute, from the folder of its models file."""
    if not is_path(reference):
        return reference
    return str((path.resolve().parent / Path(reference).expanduser()).resolve())


Entry = TypeVar("Entry", ModelEntry, PairEntry, HeadEntry)


def _kind_of(hint: Any) -> Any:
    """What a key's value is to be: tuple, Mapping, or a plain type, which may be left out."""
    if (origin := get_origin(hint)) in (tuple, Mapping):
        return origin
    return next((arg for arg in get_args(hint) if arg is not NoneType), hint)


_KINDS: dict[type, dict[str, Any]] = {
    entry: {key: _kind_of(hint) for key, hint in get_type_hints(entry).items()}
    for entry in (ModelEntry, PairEntry, HeadEntry)
}


def _entry(
    kind: type[Entry], name: str, table: object, required: tuple[str, ...], where: str
) -> Entry:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table of settings, not {table!r}")
    kinds = _KINDS[kind]
    _reject_unknown(table, [key for key in kinds if key != "name"], where)
    for key in required:
        if key not in table:
            raise ConfigError(f"{where} lacks the key '{key}'")
    for key, value in table.items():
        expected = _complaint(key, value, kinds[key])
        if expected:
            raise ConfigError(f"{where} {key} must be {expected}, not {value!r}")
    settings: dict[str, Any] = {
        key: tuple(item) if kinds[key] is tuple else item for key, item in table.items()
    }
    try:
        return kind(name=name, **settings)
    except ConfigError as error:  # the numbers of a draft tree
        raise ConfigError(f"{where} {error}") from error


def _complaint(key: str, value: object, wanted: Any) -> str:
    """What was expected of this key's value, or an empty string when it is right."""
    if key in _CHOICES:
        right = value in _CHOICES[key] and not isinstance(value, bool)
        return "" if right else "one of " + ", ".join(str(choice) for choice in _CHOICES[key])
    if wanted is tuple:
        right = isinstance(value, list) and all(item in TASKS for item in value)
        return "" if right else "a list of " + ", ".join(TASKS)
    if wanted is Mapping:
        return "" if isinstance(value, dict) else "a table"
    if wanted is bool:
        return "" if isinstance(value, bool) else "true or false"
    if wanted is int:
        least = -1 if key == "group_size" else 1
        if isinstance(value, int) and not isinstance(value, bool) and value >= least and value != 0:
            return ""
        return f"a whole number from {least} up" + (", not 0" if least < 0 else "")
    if wanted is float:
        right = isinstance(value, int | float) and not isinstance(value, bool) and value >= 1
        return "" if right else "a number from 1 up"
    if not isinstance(value, str):
        return "text in quotes"
    return "" if value or key == "note" else "text that is not empty"


def _reject_unknown(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            hint = nearest(key, list(known)) or f" Known keys: {', '.join(known)}."
            raise ConfigError(f"{where} has an unknown key '{key}'.{hint}")
