"""Runs every mutant of a module against the tests that cover it, and shows those that survive.

    scripts/mutation                     every module of the core, some minutes each
    scripts/mutation accept rows         these
    scripts/mutation kv_cache --function SlotLayer.update

A mutant is the module with one small change in it (scripts/mutation_operators.py). It is killed
when a test fails, when it cannot be imported, or when it computes ten times as long as the
unchanged module. A survivor shows behaviour that no test checks: mend the tests. If no test could
see the change, say why in scripts/mutation_explained.toml. The exit status is 1 while there are
survivors without an explanation, or explanations without a survivor.

It needs mutmut, pip install '.[test,mutation]', and a system that can fork: Linux or macOS.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.abc
import importlib.util
import os
import re
import resource
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

# set before anything imports torch, since its threads would not survive a fork
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
os.environ["TRITON_INTERPRET"] = "1"  # as in tests/conftest.py, and as early
# other plugins of the environment take longer to load than many tests run
os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "_hypothesis_pytestplugin"}

ROOT = Path(__file__).parents[1]
EXPLAINED = Path(__file__).with_name("mutation_explained.toml")

# For each module, pytest's arguments: tests that cover it within seconds
TESTS: dict[str, tuple[str, ...]] = {
    "sampling.py": (
        "tests/unit/test_noise.py",
        "tests/unit/test_sampling.py",
        "-k",
        "not chi_square and not s_distribution and not large_values",
    ),
    "verify/accept.py": ("tests/unit/test_accept.py",),
    "verify/masks.py": ("tests/unit/test_masks.py",),
    "drafting/search.py": ("tests/property/test_search.py",),
    "drafting/policies/cost.py": ("tests/unit/test_cost_policy.py", "tests/unit/test_policies.py"),
    "drafting/policies/disco.py": ("tests/unit/test_policies.py",),
    "drafting/policies/fixed.py": ("tests/unit/test_policies.py",),
    "drafting/policies/heuristic.py": ("tests/unit/test_policies.py",),
    "lab/baselines/oracle.py": ("tests/unit/test_policies.py",),
    "lab/baselines/searches.py": (
        "tests/property/test_search.py",
        "tests/property/test_chain_methods.py",
    ),
    "drafting/policies/registry.py": (
        "tests/unit/test_policy_registry.py",
        "tests/unit/test_cost_policy.py",
    ),
    "drafting/iteration_cost.py": ("tests/unit/test_iteration_cost.py",),
    "models/pass_rows.py": ("tests/unit/test_masks.py",),
    "models/kv_cache.py": ("tests/unit/test_kv_cache.py", "tests/unit/test_graphs.py"),
}

# Imported once, before the forks. Nothing of specexec_cli: it is imported around each mutant.
_IMPORTED_ONCE = (
    "torch", "transformers", "transformers.cache_utils", "transformers.modeling_utils",
    "transformers.generation.logits_process", "tokenizers", "scipy.stats", "hypothesis.strategies",
    "_hypothesis_pytestplugin", "pytest", "specexec_kernels.dispatch",
)  # fmt: skip
_SLOWER = 10  # times the seconds of the module as it is: an endless loop
_MOST_BYTES = 8 << 30  # more is a loop that fills the memory
_PATIENCE_S = 600  # more is a wait for something that never comes


@dataclass(frozen=True, slots=True)
class Change:
    """A change as mutation_explained.toml names it."""

    module: str
    function: str
    was: str
    now: str

    @classmethod
    def of(cls, module: str, function: str, was: str, now: str) -> Change:
        """Without the remarks at ends of lines, which may be reworded."""
        return cls(
            module, function, *(re.sub(r"  # .*", "", lines).strip() for lines in (was, now))
        )

    def __str__(self) -> str:
        lines = [f"- {line}" for line in self.was.splitlines()]
        lines += [f"+ {line}" for line in self.now.splitlines()]
        return "\n".join(f"    {line}" for line in lines)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the tests on a mutant."""

    killed: bool
    cpu_s: float
    output: str


class Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a source of ours."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self._name, self._path, self._source = name, path, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds that one module."""
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        """Runs our source instead of the file's."""
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


def run_tests(path: Path, source: str, tests: Sequence[str], most_cpu_s: float) -> Outcome:
    """Runs the tests in a fork of this process that imports `path` from `source`."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.setsid()  # what the tests start is ended with them
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_CPU, (int(most_cpu_s) + 1,) * 2)
            resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES,) * 2)
            status = 1
            try:
                status = _test_in_child(path, source, tests)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        status, cpu_s = _wait(child)
        output.seek(0)
        return Outcome(status != 0, cpu_s, output.read())


def _test_in_child(path: Path, source: str, tests: Sequence[str]) -> int:
    """The exit status of pytest."""
    import pytest

    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    sys.meta_path.insert(0, Replaced(name, path, source))
    importlib.import_module(name)
    # asserts that explain themselves take longer to import
    return int(pytest.main(["-x", "-q", "--tb=short", "--assert=plain", *tests]))


def _wait(child: int) -> tuple[int, float]:
    """Waits for a child; its status and the seconds that it computed. Ends it after _PATIENCE_S."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            return status, usage.ru_utime + usage.ru_stime
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)


def check_module(module: str, function: str | None, explained: Iterable[Change]) -> bool:
    """Runs the mutants of a module, prints those that survive without an explanation.

    Args:
        module: a name of the table above.
        function: run only the mutants of this function; None for all.
        explained: the changes that mutation_explained.toml explains.
    Returns:
        whether there was no such survivor, and no explanation without a survivor.
    """
    from mutation_operators import mutants

    path, tests = ROOT / "specexec_cli" / module, TESTS[module]
    source = path.read_text()
    plain = run_tests(path, source, tests, 3600)
    if plain.killed:
        sys.exit(f"{plain.output}\n{module}: its tests fail as it is")
    tried = [mutant for mutant in mutants(source) if function in (None, mutant.function)]
    print(f"{module}: {len(tried)} mutants, {plain.cpu_s:.1f} s of tests", flush=True)
    wanted = {
        change
        for change in explained
        if change.module == module and function in (None, change.function)
    }
    survived = []
    for mutant in tried:
        if run_tests(path, mutant.source, tests, _SLOWER * plain.cpu_s + 10).killed:
            continue
        survived.append(Change.of(module, mutant.function, mutant.was, mutant.now))
        if survived[-1] not in wanted:
            where = f"{module}:{mutant.line} {mutant.function}"
            print(f"  survived: {where}\n{survived[-1]}", flush=True)
    for change in wanted - set(survived):
        print(f"  explained, but no survivor: {module} {change.function}\n{change}")
    unexplained = sum(change not in wanted for change in survived)
    print(
        f"{module}: {len(tried) - len(survived)} killed, {len(survived) - unexplained} survived "
        f"and explained, {unexplained} survived",
        flush=True,
    )
    return set(survived) == wanted


def _explained() -> list[Change]:
    entries = tomllib.loads(EXPLAINED.read_text())["explained"]
    return [
        Change.of(entry["module"], entry["function"], entry["was"], entry["now"])
        for entry in entries
    ]


def main() -> None:
    """Checks the modules that were named, or all."""
    names = {Path(module).stem: module for module in TESTS}
    parser = argparse.ArgumentParser(
        "scripts/mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("module", nargs="*", metavar="MODULE", help=", ".join(names))
    parser.add_argument("--function", help="only mutants of this one, named as in what is printed")
    arguments = parser.parse_args()
    for name in arguments.module:
        if name not in names:
            parser.error(f"no module {name!r}: choose from {', '.join(names)}")
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    for name in _IMPORTED_ONCE:
        importlib.import_module(name)
    import hypothesis

    # the same examples for every mutant, and no search for a smaller one that fails too
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutation", derandomize=True, database=None, phases=phases)
    hypothesis.settings.load_profile("mutation")
    gc.freeze()  # so that no fork searches for garbage in what was imported
    explained = _explained()
    right = [
        check_module(names[name], arguments.function, explained)
        for name in arguments.module or names
    ]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
