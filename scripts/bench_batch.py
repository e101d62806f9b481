"""Measure several texts at once against one alone, on a model larger than the memory it may use.

    python scripts/make_rig.py --shape llama2-7b --out /var/tmp/rig-7b
    python scripts/bench_batch.py --rig /var/tmp/rig-7b --cap 4GB --texts 4,16

One run generates some texts one after another, as `generate` does, then several texts at once. Each
of those must be the text that it is alone. Every pass and every text is reported on stderr as it
ends. There are two ratios: tokens/s of all texts over tokens/s of one text alone, and each text's
speed over its own speed alone. Both are taken to the last text's end, and also to the first text's
end, since with a queue no seat would be empty before that. Another text is submitted in the middle
of a pass; the passes until its first token are counted, that pass included. Prints a table; the
last line is JSON.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from batch_measure import Config, at_once, one_after_another
from batch_passes import recorded
from capped_bench import cap_bytes, rig_parser, run_and_show
from memory_cap import cgroup_peak_bytes
from offload_report import environment
from rich.console import Console
from rich.table import Table

SCHEMA = 2


def run(config: Config) -> dict[str, Any]:
    """Measures everything that is asked for; each text must be the one that it is alone."""
    with recorded() as passes:
        alone = one_after_another(config, passes)
        batches = [at_once(config, count, alone, passes) for count in config.texts]
    rate = sum(len(each.tokens) for each in alone) / sum(each.seconds for each in alone)
    for found in batches:
        found["over_alone"] = found["tokens"] / found["seconds"] / rate
        found["over_alone_while_all"] = (
            found["tokens_while_all"] / found["seconds_while_all"] / rate
        )
    return {
        **environment(config.rig, config.seed),
        "schema": SCHEMA,
        "bench": "batch",
        "config": {**asdict(config), "rig": str(config.rig), "draft": str(config.draft)},
        "alone": [
            {"tokens": len(text.tokens), "seconds": text.seconds, **text.sums} for text in alone
        ],
        "alone_tokens_per_s": rate,
        "batches": batches,
        "cgroup_peak_bytes": cgroup_peak_bytes() if config.cap_bytes else None,
    }  # fmt: skip


def show(report: dict[str, Any]) -> None:
    """Prints the table: a line for the texts alone, and two for each number of texts at once."""
    table = Table()
    table.add_column("texts", justify="right", no_wrap=True)
    for title in ("tokens/s", "over one", "each over itself alone", "tokens a pass",
                  "rows a pass", "s a pass", "passes to a first token"):  # fmt: skip
        table.add_column(title, justify="right")
    total = {name: sum(text[name] for text in report["alone"]) for name in report["alone"][0]}
    table.add_row(
        "1", f"{report['alone_tokens_per_s']:.2f}", "1.00", "1.00", *_per_pass(total), "1"
    )
    for each in report["batches"]:
        shares = each["each_over_alone"]
        table.add_row(
            str(each["texts"]), f"{each['tokens'] / each['seconds']:.2f}",
            f"{each['over_alone']:.2f}", f"{min(shares):.2f} to {max(shares):.2f}",
            *_per_pass(each), str(each["first_token_passes"]),
        )  # fmt: skip
        while_all = each["tokens_while_all"] / each["seconds_while_all"]
        table.add_row(
            "until one ends", f"{while_all:.2f}", f"{each['over_alone_while_all']:.2f}", "",
            f"{each['tokens_while_all'] / each['passes_while_all']:.2f}", "", "", "",
        )  # fmt: skip
    Console(stderr=True, width=110).print(table)


def _per_pass(found: dict[str, Any]) -> tuple[str, str, str]:
    """The mean tokens, rows and seconds of a pass, as shown in the table."""
    rows, passes = found["pending_rows"] + found["nodes"], found["passes"]
    tokens, seconds = found["tokens"] / passes, found["seconds"] / passes
    return f"{tokens:.2f}", f"{rows / passes:.1f}", f"{seconds:.2f}"


def parse(argv: list[str]) -> Config:
    """The command's options as a Config."""
    parser = rig_parser(__doc__, "of make_rig.py")
    parser.add_argument("--cap", default="4GB", metavar="SIZE", help="RAM limit, or none")
    parser.add_argument("--texts", default="4,16", metavar="N,...")
    parser.add_argument("--alone", type=int, default=4, help="texts one after another")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, help="left of each prompt; default: all")
    parser.add_argument("--context", type=int, default=512, help="tokens to plan memory for")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--budget", type=int, help="of a pass; default: as generate and serve")
    parser.add_argument("--depth", type=int)
    parser.add_argument("--policy", help="default: cost")
    parser.add_argument("--no-past", action="store_true")
    parser.add_argument("--batch", type=int, help="nodes of a draft step")
    args = parser.parse_args(argv)
    return Config(
        rig=args.rig, draft=args.draft,
        cap_bytes=cap_bytes(args.cap),
        texts=tuple(int(part) for part in args.texts.split(",")), alone=args.alone,
        max_tokens=args.max_tokens, prompt_tokens=args.prompt_tokens,
        context_tokens=args.context, temperature=args.temperature,
        budget=args.budget, depth=args.depth, batch=args.batch, policy=args.policy,
        past=not args.no_past, seed=args.seed,
    )  # fmt: skip


def main(argv: list[str]) -> int:
    return run_and_show(__file__, argv, parse, run, show)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
