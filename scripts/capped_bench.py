"""The command line that benchmarks under a memory limit share."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memory_cap import KIND_VARIABLE, run_capped
from offload_setup import DEMO

from specexec_cli.cli.machine import parse_bytes
from specexec_cli.cli.main import wait_briefly
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, SpecexecError


def rig_parser(doc: str | None, rig_help: str) -> argparse.ArgumentParser:
    """A parser with the options for models and seed; its description is the first line of `doc`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--rig", type=Path, required=True, metavar="DIR", help=rig_help)
    parser.add_argument("--draft", type=Path, default=DEMO / "draft", metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def cap_bytes(cap: str) -> int | None:
    """The bytes of the option --cap; None for no limit."""
    return None if cap == "none" else parse_bytes(cap, "--cap")


def run_and_show(
    script: str,
    argv: list[str],
    parse: Callable[[list[str]], Any],
    run: Callable[[Any], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> int:
    """Runs a benchmark, under its limit in a process of its own, and prints table and JSON.

    Args:
        script: the file to run again in a process under the limit.
        parse: turns options into a config with `cap_bytes`.
        run: measures what the config asks for.
        show: prints the table.
    Returns:
        the exit status.
    """
    try:
        config = parse(argv)
        if config.cap_bytes and KIND_VARIABLE not in os.environ:
            wait_briefly()  # as the program does; it is read where torch is loaded, by the child
            return run_capped([sys.executable, script, *argv], config.cap_bytes)
        report = run(config)
    except SpecexecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    show(report)
    print(json.dumps(report))
    return 0
