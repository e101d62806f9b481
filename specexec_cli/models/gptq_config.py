"""Reads from a checkpoint's config files how its weights are quantized.

config.json's quantization_config comes first, then quantize_config.json (AutoGPTQ, GPTQModel), then
quant_config.json (AutoAWQ). Methods, formats and dtypes that cannot be read are refused by name.
This module looks at no tensors: models.gptq_tensors compares them with the config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specexec_kernels.formats import METHODS
from specexec_kernels.patterns import check, matches

from specexec_cli.catalog.packed_formats import PACKED_KINDS, PackedKind
from specexec_cli.errors import CheckpointError
from specexec_cli.guarded import read_json

Notice = Callable[[str], None]

_FILES = ("quantize_config.json", "quant_config.json")
# methods with layouts that no kernel here has
_UNREADABLE = {
    "hqq": "its zero points are fractions, where those of layouts that are read are whole",
}
_NAME = re.compile(r"[\w.-]+")  # a plain module name, not a regular expression
_TRUSTED_SINCE = (0, 9, 0)  # the first GPTQModel that stores zero points without loss


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """How one linear is quantized."""

    method: str  # a name in PACKED_KINDS
    bits: int
    group_size: int  # inputs per group; -1: all of them
    desc_act: bool
    sym: bool | None  # None: the config does not say
    v2: bool  # by the variant's name, zero points are stored as they are, not minus one

    @property
    def kind(self) -> PackedKind:
        """The PACKED_KINDS entry of the method."""
        return PACKED_KINDS[self.method]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """How a checkpoint is quantized: one rule, and exceptions by module name."""

    source: Path  # the config file
    spec: QuantSpec
    variant: str  # the name of the format's variant
    lossless_v1: bool  # the tool that wrote it kept asymmetric v1 zero points without loss
    named: Mapping[str, Mapping[str, Any] | None]  # full name -> overrides; None: not quantized
    rules: tuple[tuple[str, Mapping[str, Any] | None], ...]  # pattern -> overrides, in order

    @classmethod
    def from_checkpoint(
        cls, folder: Path, config: Mapping[str, Any], notice: Notice
    ) -> QuantConfig | None:
        """The quantization of a checkpoint folder, or None for a plain one.

        Args:
            config: config.json as a dict.
            notice: told when the config files disagree; the first one is believed.
        Raises:
            CheckpointError: a broken file, or a method, format or dtype that cannot be read.
        """
        found = [
            (path, _parse(keys, path))
            for path, keys in _config_files(folder, config)
            if isinstance(keys, Mapping)
        ]
        if not found:
            return None
        path, first = found[0]
        for other_path, other in found[1:]:
            differing = _differences(first.spec, other.spec)
            if differing:
                notice(
                    f"{path.name} and {other_path.name} disagree on the quantization "
                    f"({differing}): {path.name} is believed"
                )
        return first

    def for_module(self, name: str) -> QuantSpec | None:
        """How the linear `name` (full name in the checkpoint) is quantized; None: not at all.

        A rule for this very name decides, else the first pattern that matches the beginning of the
        name, as in GPTQModel.

        Raises:
            CheckpointError: a rule asks for an unsupported quantization, or takes too long to
                match.
        """
        try:
            found = (each for pattern, each in self.rules if matches(pattern, name))
            overrides = self.named[name] if name in self.named else next(found, {})
        except ValueError as error:
            raise CheckpointError(f"{self.source}: its rules for '{name}': {error}") from error
        return None if overrides is None else _override(self.spec, overrides, self.source)


def _config_files(folder: Path, config: Mapping[str, Any]) -> list[tuple[Path, Any]]:
    files: list[tuple[Path, Any]] = [(folder / "config.json", config.get("quantization_config"))]
    for name in _FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            files.append((path, read_json(path)))
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    return files


def _parse(keys: Mapping[str, Any], path: Path) -> QuantConfig:
    kind = _kind(keys, path)
    pack_dtype = keys.get("pack_dtype", "int32")
    if pack_dtype != "int32":
        raise CheckpointError(
            f"{path}: pack_dtype '{pack_dtype}' is not supported, only int32 is: "
            "use a checkpoint that was quantized with pack_dtype int32"
        )
    variant = _variant(keys, kind, path)
    if keys.get("data_type", "int") != "int":
        raise CheckpointError(
            f"{path}: {kind.name} weights of data_type '{keys['data_type']}' are not supported, "
            "only int is: use the original weights"
        )
    sym = keys.get("sym")
    if sym is None and "zero_point" in keys:
        sym = not keys["zero_point"]
    if not isinstance(sym, bool | None):
        raise CheckpointError(f"{path}: sym must be true or false, not {sym!r}")
    spec = QuantSpec(
        method=kind.method,
        bits=_integer(keys, ("bits", "w_bit", "wbits"), path),
        group_size=_integer(keys, ("group_size", "q_group_size"), path),
        desc_act=bool(keys.get("desc_act", False)),
        sym=sym,
        v2=kind.zeros_minus_one and variant in kind.plain_zeros,
    )
    _check(spec, path)
    extra = _extra(keys, path)
    return QuantConfig(
        source=path,
        spec=spec,
        variant=variant,
        lossless_v1=_is_lossless(keys.get("meta")),
        named={key: each for key, each in extra.items() if _NAME.fullmatch(key)},
        rules=_rules(keys, {key: e for key, e in extra.items() if not _NAME.fullmatch(key)}, path),
    )


def _kind(keys: Mapping[str, Any], path: Path) -> PackedKind:
    """The format that the config names; without a name, the one that its keys fit, or the first."""
    name = keys.get("quant_method", keys.get("method"))
    if name is None:
        known = PACKED_KINDS.values()
        own = (k for k in known if path.name == k.own_file or (k.own_key and k.own_key in keys))
        return next(own, next(iter(known)))
    name = str(name).lower()
    kinds = [kind for kind in PACKED_KINDS.values() if kind.name == name]
    if not kinds:
        names = dict.fromkeys(kind.name for kind in PACKED_KINDS.values())
        *others, last = (*names, *METHODS)
        reason = f": {_UNREADABLE[name]}" if name in _UNREADABLE else ""
        raise CheckpointError(
            f"{path}: quantization method '{name}' is not supported{reason}. Supported are "
            f"{', '.join(others)} and {last}: use such a checkpoint of the model, or the original "
            "weights"
        )
    return next((kind for kind in kinds if _named_variant(keys, kind) in kind.variants), kinds[0])


def _named_variant(keys: Mapping[str, Any], kind: PackedKind) -> str:
    usual = (
        "marlin"
        if keys.get("is_marlin_format")
        else keys.get("checkpoint_format", keys.get("format"))
    )
    named = [*(keys.get(key) for key in kind.variant_keys), usual, kind.variants[0]]
    return str(next(name for name in named if name)).lower()


def _variant(keys: Mapping[str, Any], kind: PackedKind, path: Path) -> str:
    variant = _named_variant(keys, kind)
    if variant not in kind.variants:
        alike = (each for each in PACKED_KINDS.values() if each.name == kind.name)
        variants = [name for each in alike for name in each.variants]
        raise CheckpointError(
            f"{path}: {kind.name} format '{variant}' is not supported. Supported: "
            f"{', '.join(variants)}; convert the checkpoint with the tool that wrote it"
        )
    return variant


def _integer(keys: Mapping[str, Any], names: tuple[str, ...], path: Path) -> int:
    for name in names:
        value = keys.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if value is not None:
            raise CheckpointError(f"{path}: {name} must be a whole number, not {value!r}")
    raise CheckpointError(f"{path}: the quantization has no '{names[0]}'; download the file again")


def _check(spec: QuantSpec, path: Path) -> None:
    if spec.bits not in spec.kind.bits:
        known = ", ".join(map(str, spec.kind.bits))
        raise CheckpointError(
            f"{path}: {spec.method} with {spec.bits} bits is not supported; supported: {known}"
        )
    if spec.group_size != -1 and spec.group_size < 1:
        raise CheckpointError(
            f"{path}: group_size must be -1 (all inputs) or at least 1, not {spec.group_size}"
        )


def _is_lossless(meta: Any) -> bool:
    """Whether `meta.quantizer` names GPTQModel 0.9.0 or later."""
    quantizers = meta.get("quantizer") if isinstance(meta, Mapping) else None
    for entry in quantizers if isinstance(quantizers, list) else [quantizers]:
        name, _, version = str(entry).partition(":")
        numbers = tuple(int(part) for part in re.findall(r"\d{1,9}", version)[:3])
        if name.strip().lower() == "gptqmodel" and numbers >= _TRUSTED_SINCE:
            return True
    return False


def _extra(keys: Mapping[str, Any], path: Path) -> Mapping[str, Mapping[str, Any] | None]:
    """AutoRound's rules: module name or regex -> overrides; None where the linear stays plain."""
    extra = keys.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(v, Mapping) for v in extra.values()):
        raise CheckpointError(f"{path}: 'extra_config' must map names to settings, not {extra!r}")

    def is_plain(overrides: Mapping[str, Any]) -> bool:
        bits = overrides.get("bits")
        return isinstance(bits, int) and bits >= 16

    return {key: None if is_plain(each) else each for key, each in extra.items()}


def _rules(
    keys: Mapping[str, Any], extra: Mapping[str, Mapping[str, Any] | None], path: Path
) -> tuple[tuple[str, Mapping[str, Any] | None], ...]:
    rules: list[tuple[str, Mapping[str, Any] | None]] = []
    dynamic = keys.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(
        isinstance(settings, Mapping | None) for settings in dynamic.values()
    ):
        raise CheckpointError(f"{path}: 'dynamic' must map patterns to settings, not {dynamic!r}")
    for key, overrides in dynamic.items():
        excluded = key.startswith("-")
        pattern = re.sub(r"^[-+]:?", "", key)
        _check_regex(pattern, "dynamic", path)
        rules.append((pattern, None if excluded else overrides or {}))
    for key, overrides in extra.items():
        pattern = rf"(?:{key})$"
        _check_regex(pattern, "extra_config", path)
        rules.append((pattern, overrides))
    plain = keys.get("modules_to_not_convert") or []  # in AWQ, parts of module names
    if not isinstance(plain, list) or not all(isinstance(part, str) for part in plain):
        raise CheckpointError(
            f"{path}: 'modules_to_not_convert' must be a list of names, not {plain!r}"
        )
    for part in plain:
        rules.append((rf".*{re.escape(part)}", None))
    return tuple(rules)


def _check_regex(pattern: str, key: str, path: Path) -> None:
    try:
        check(pattern)
    except ValueError as error:
        raise CheckpointError(f"{path}: {key} rule '{pattern}' is no regex: {error}") from error


def _override(spec: QuantSpec, overrides: Mapping[str, Any], path: Path) -> QuantSpec:
    known = {
        name: overrides[name]
        for name in ("bits", "group_size", "desc_act", "sym")
        if name in overrides
    }
    for name in known.keys() & {"bits", "group_size"}:
        if type(known[name]) is not int:
            raise CheckpointError(f"{path}: a rule says {known[name]!r} as '{name}', no number")
    for name in known.keys() & {"desc_act", "sym"}:
        if type(known[name]) is not bool:
            raise CheckpointError(f"{path}: a rule says {known[name]!r} as '{name}', no bool")
    special = replace(spec, **known)
    _check(special, path)
    return special


def _differences(first: QuantSpec, other: QuantSpec) -> str:
    names = ("method", "bits", "group_size", "desc_act", "sym", "v2")
    pairs = [(name, getattr(first, name), getattr(other, name)) for name in names]
    return ", ".join(f"{name} {one} and {two}" for name, one, two in pairs if one != two)
