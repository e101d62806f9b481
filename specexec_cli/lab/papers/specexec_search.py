"""SpecExec (arXiv:2406.02532): its algorithms, the trees they search, and their draft models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from specexec_cli.config import TreeConfig
from specexec_cli.lab.bench.cases import BASELINE, Case
from specexec_cli.lab.bench.metrics import paired_difference, ratio_and_error
from specexec_cli.lab.papers.registry import Claim, Finding, Table, recipe
from specexec_cli.lab.papers.specexec_rates import AVERAGES, PAPER, sampling, tree

_SMALL_PROMPTS = 10

if TYPE_CHECKING:
    from specexec_cli.drafting.search import Expand, Floats, Frontier, Ints
    from specexec_cli.lab.bench.datasets import Dataset
    from specexec_cli.lab.papers.lab import Lab, Rate
    from specexec_cli.session import TextSession


@recipe(
    "specexec-algorithm-1",
    printed="for every random seed the very tokens of sequential sampling (section 4.1)",
)
def algorithm_1(lab: Lab) -> Finding:
    """Compares the texts of both searches with plain decoding."""
    data = lab.dataset("oasst", small=2)
    tokens = lab.tokens(128, 16)
    small = TreeConfig(budget=16, max_depth=8, batch=4)
    cases = [
        Case(method, None if method == BASELINE else small, sampling(t, lab.seed), tokens)
        for t in (0.0, 0.6)
        for method in (BASELINE, PAPER, "specexec")
    ]
    found = lab.rows(cases, data)
    rows, claims = [], []
    for case in cases:
        if case.tree is not None:
            plain = found[replace(case, method=BASELINE, tree=None)]
            # both begin with the first prompts, but one may have used more of them
            pairs = list(zip(found[case], plain, strict=False))
            same = sum(ours["tokens"] == theirs["tokens"] for ours, theirs in pairs)
            where = f"{case.method}, temperature {case.sampling.temperature:g}"
            rows.append([case.method, f"{case.sampling.temperature:g}", f"{same}/{len(pairs)}"])
            claims.append(Claim(f"every text is that of plain decoding ({where})",
                                same == len(pairs)))  # fmt: skip
    return Finding(tables=[Table("Same text", ["method", "temp", "same"], rows)], claims=claims)


@dataclass
class Drafts:
    """Gives searches the draft model's predictions after a context, and counts its passes."""

    session: TextSession
    context: Sequence[int]
    passes: int = 0
    _paths: dict[int, list[int]] = field(default_factory=lambda: {-1: []})

    def expand(self, frontier: Frontier, width: int) -> tuple[Floats, Ints]:
        """See search.Expand; runs a pass over each node's whole text, without a cache."""
        import torch

        self.passes += 1
        logits = []
        for node, parent, token in zip(
            frontier.ids.tolist(), frontier.parents.tolist(), frontier.tokens.tolist(), strict=True
        ):
            if node >= 0:
                self._paths[node] = [*self._paths[parent], token]
            text = [*self.context, *self._paths[node]]
            logits.append(self.session.draft_logits([*text, 0], len(text))[0])
        best = (
            torch.stack(logits)[:, : self.session.vocab_size].double().log_softmax(-1).topk(width)
        )
        return best.values.cpu().numpy(), best.indices.cpu().numpy()


@recipe(
    "specexec-algorithm-2",
    printed="equations 1 to 5 and algorithm 2: the K likeliest prefixes, found in at most D rounds "
    "of B nodes; beam search covers less (appendix E)",
)
def algorithm_2(lab: Lab) -> Finding:
    """Compares searches: draft passes, nodes, and the probability that each tree covers."""
    import numpy as np

    from specexec_cli.drafting.search import grow_tree
    from specexec_cli.lab.baselines.searches import grow_beam, grow_beam_pruned, grow_in_rounds

    data = lab.dataset("oasst", small=2)
    contexts = [prompt.tokens for prompt in lab.encoded(data, 64)][: 20 if lab.full else 2]
    searches = {"algorithm 2": grow_in_rounds, "best-first to its end": grow_tree,
                "beam search": grow_beam, "beam search, pruned": grow_beam_pruned}  # fmt: skip
    sizes = [(128, 16, 4), (64, 8, 2), (64, 16, 8)] if lab.full else [(16, 4, 4)]
    rows, claims = [], []
    for budget, depth, batch in sizes:
        config = TreeConfig(budget=budget, max_depth=depth, batch=batch)
        passes: dict[str, list[int]] = {name: [] for name in searches}
        nodes: dict[str, list[int]] = {name: [] for name in searches}
        covered: dict[str, list[float]] = {name: [] for name in searches}
        for context in contexts:
            for name, search in searches.items():
                drafts = Drafts(lab.session([data], 64), context)
                expand: Expand = drafts.expand
                grown = search(expand, config, depth, None).tree
                passes[name].append(drafts.passes)
                nodes[name].append(len(grown))
                covered[name].append(float(np.exp(grown.log_probs).sum()))
        size = f"K={budget}, D={depth}, B={batch}"
        rows += [
            [size, name, f"{np.mean(passes[name]):.1f}", f"{np.mean(nodes[name]):.1f}",
             f"{np.mean(covered[name]):.3f}"]
            for name in searches
        ]  # fmt: skip
        best = covered["best-first to its end"]
        claims += [
            Claim(f"algorithm 2 takes no more than D draft passes ({size})",
                  max(passes["algorithm 2"]) <= depth),
            Claim(f"algorithm 2 leaves no more than (D - 1) B nodes ({size})",
                  max(nodes["algorithm 2"]) <= (depth - 1) * batch),
            Claim(f"no search covers more than the K likeliest prefixes ({size})",
                  all(one <= most + 1e-9 for found in covered.values()
                      for one, most in zip(found, best, strict=True))),
            Claim(f"beam search covers less than these, and pruned beams less again ({size})",
                  sum(covered["beam search, pruned"]) < sum(covered["beam search"]) < sum(best)),
        ]  # fmt: skip
    header = ["size", "search", "draft passes", "nodes", "expected accepted tokens"]
    note = "expected by the draft model: the sum of the nodes' probabilities, equation 3"
    return Finding(tables=[Table("Means over contexts", header, rows)], claims=claims, notes=[note])


@recipe(
    "specexec-figure-2",
    printed="the target's 1 to 4 likeliest tokens hold 90-98 % of its probability; all draft "
    "models' tokens come to over 90 %",
)
def figure_2(lab: Lab) -> Finding:
    """Target probability that the draft model's first tokens cover, by rank (section 5.1)."""
    from specexec_cli.config import SamplingConfig
    from specexec_cli.lab.bench.coverage import measure_coverage
    from specexec_cli.lab.papers.draw import curves
    from specexec_cli.lab.papers.lab import Difference

    data = lab.dataset("oasst", small=6)
    tokens = lab.tokens(64, 24)
    prompts = lab.encoded(data, tokens)[:512]
    ranks = (1, 2, 4, 8, 16, 32, 64)
    sampled = SamplingConfig(temperature=1.0, seed=lab.seed)
    session = lab.session([data], tokens)
    found = [measure_coverage(session, [one], sampled, tokens, ranks) for one in prompts]
    wholes = [one.positions for one in found]
    own = _by_rank([one.target_mass for one in found], wholes)
    drafted = _by_rank([one.draft_mass for one in found], wholes)
    masses = [[ratio_and_error([part for part, _ in parts], wholes) for parts in each]
              for each in (own, drafted)]  # fmt: skip
    cells = [[f"{mass:.1%} ±{error:.1%}" for mass, error in each] for each in masses]
    rows = [[str(k), *both] for k, *both in zip(ranks, *cells, strict=True)]
    four = ranks.index(4)
    most = [(0.8 * part, whole) for part, whole in own[four]]
    return Finding(
        tables=[Table(f"Covered probability, {sum(wholes)} positions, with standard errors over "
                      f"{len(found)} prompts", ["k", "target's own", "draft's"], rows)],
        claims=[
            Claim(f"four tokens hold most of the target's probability ({cells[0][four]})",
                  Difference(masses[0][four][0] - 0.5, masses[0][four][1]).shown),
            Claim("the draft's four hold over 0.8 of what the target's four do "
                  f"({cells[1][four]})",
                  Difference(*paired_difference(drafted[four], most)).shown),
        ],
        figures={"": lambda: curves(
            "Probability of the target covered", "k likeliest tokens", "mean over positions",
            {name: (ranks, [mass for mass, _ in each], [error for _, error in each])
             for name, each in zip(("target's own", "draft model's"), masses, strict=True)},
            doubling=True)},
    )  # fmt: skip


def _by_rank(
    masses: Sequence[Sequence[float]], positions: Sequence[int]
) -> list[list[tuple[float, int]]]:
    """Of every rank, each prompt's sum of masses and its positions."""
    return [
        [(mass * count, count) for mass, count in zip(rank, positions, strict=True)]
        for rank in zip(*masses, strict=True)
    ]


# target -> draft models and their titles, the one nearest to the target first
_DRAFTS: dict[str, dict[str | None, str]] = {
    "llama2-70b-chat": {
        "llama2-13b-chat": "Llama 2 13B", "llama2-7b-chat": "Llama 2 7B",
        "llama2-7b-chat-gptq": "Llama 2 7B, 4 bits", "tinyllama-1.1b-chat": "TinyLlama 1.1B",
        "llama-160m": "160M",
    },
}  # fmt: skip
_OWN: dict[str | None, str] = {"self": "target in 4 bits", None: "the pair's own"}


@recipe(
    "specexec-figure-5",
    printed="the nearer a draft model is to the target, the more of its tokens are accepted: 13B "
    "above 7B (in 16 and 4 bits) above TinyLlama 1.1B and 160M (OASST, t = 0.6)",
)
def figure_5(lab: Lab) -> Finding:
    """The paper's draft models for its target; for other targets, their own 4-bit copies too."""
    from specexec_cli.lab.papers.draw import curves
    from specexec_cli.lab.papers.lab import rate

    budgets, tokens = (16, 64, 256, 1024) if lab.full else (4, 8, 16, 32), lab.tokens(128, 32)
    data = lab.dataset("oasst", chat=False, small=_SMALL_PROMPTS)
    lines: dict[str, Any] = {}
    rows, last = [], {}
    drafts = _DRAFTS.get(lab.session([data], tokens).pair.target.name, _OWN)
    for draft, title in drafts.items():
        cases = [Case(PAPER, tree(size, full=lab.full), sampling(0.6, lab.seed), tokens)
                 for size in budgets]  # fmt: skip
        found = [rate(one) for one in lab.rows(cases, data, draft).values()]
        lines[title] = budgets, [one.micro for one in found], [one.error for one in found]
        last[title] = found[-1]
        rows.append([title, *map(str, found)])
    titles = list(drafts.values())
    better, worse = titles[0], titles[-1]
    more = last[better].above(last[worse])
    return Finding(
        tables=[Table("Committed tokens per target pass by budget, with standard errors",
                      ["draft model", *map(str, budgets)], rows)],
        claims=[Claim(f"{better} drafts better than {worse} ({more} of micro at {budgets[-1]}, "
                      f"{last[better].macro_above(last[worse])} of macro)", more.shown)],
        notes=["the paper's draft models are those of `-m llama2-70b-chat`", AVERAGES],
        figures={"": lambda: curves(
            "Draft models of one target, temperature 0.6", "budget",
            "committed tokens per target pass, micro", lines, doubling=True)},
    )  # fmt: skip


# appendix E: standard beam search, and the same without pruning
_BEAM_SEARCHES = {"beam-pruned": "standard beam search", "beam": "without pruning"}


@recipe(
    "specexec-figure-6",
    printed="appendix E: beam search that keeps all its hypotheses accepts more than one that "
    "returns the last beams alone, at every size; the latter ends early",
)
def figure_6(lab: Lab) -> Finding:
    """Tokens per pass over a grid of beam sizes and lengths, on each of the paper's datasets."""
    beams = (1, 2, 4, 8, 16, 32) if lab.full else (1, 2, 4, 8)
    lengths = (2, 4, 8, 16, 32) if lab.full else (8,)
    sets = [lab.dataset(name, chat=False, small=_SMALL_PROMPTS)
            for name in (("oasst", "wikitext2") if lab.full else ("demo",))]  # fmt: skip
    tokens = lab.tokens(64, 24)
    lab.session(sets, tokens)
    tables, claims = [], []
    figures: dict[str, Callable[[], Any]] = {}
    for data in sets:
        rates = _beam_rates(lab, data, beams, lengths, tokens)
        rows = [
            [kind, str(length), *(str(rates[method, length, count]) for count in beams)]
            for length in lengths
            for method, kind in _BEAM_SEARCHES.items()
        ]
        tables.append(
            Table(f"Committed tokens per target pass on {data.name}, with standard errors",
                  ["search", "length", *(f"{count} beams" for count in beams)], rows)
        )  # fmt: skip
        worse = sum(
            rates["beam-pruned", n, b].above(rates["beam", n, b]).shown
            for n in lengths
            for b in beams
        )
        widest, longest = beams[-1], lengths[-1]
        more = rates["beam", longest, widest].above(rates["beam-pruned", longest, widest])
        claims += [
            Claim(f"all hypotheses commit more than the last beams alone, with {widest} beams of "
                  f"{longest} tokens ({data.name}: {more})", more.shown),
            Claim(f"all hypotheses commit less at no size ({data.name}: {worse} of "
                  f"{len(lengths) * len(beams)})", worse == 0),
        ]  # fmt: skip
        figures[data.name] = partial(_beam_grids, data.name, rates, beams, lengths)
    return Finding(
        tables=tables, claims=claims, figures=figures,
        notes=["beams are ranked by the draft's probabilities under the temperature, with tokens "
               "outside of its nucleus lowered",
               "more and less: by more than two standard errors of the difference over prompts",
               AVERAGES],
    )  # fmt: skip


def _beam_rates(
    lab: Lab, data: Dataset, beams: Sequence[int], lengths: Sequence[int], tokens: int
) -> dict[tuple[str, int, int], Rate]:
    """The rates of both beam searches by (method, length, number of beams)."""
    from specexec_cli.lab.papers.lab import rate

    cases = {
        (method, length, count): Case(
            method,
            TreeConfig(budget=count * length, max_depth=length, batch=count, scoring="probs",
                       calibrated=False),
            sampling(0.6, lab.seed), tokens,
        )
        for length in lengths for count in beams for method in _BEAM_SEARCHES
    }  # fmt: skip
    found = lab.rows([*cases.values()], data)
    return {size: rate(found[case]) for size, case in cases.items()}


def _beam_grids(
    name: str,
    rates: Mapping[tuple[str, int, int], Rate],
    beams: Sequence[int],
    lengths: Sequence[int],
) -> Any:
    from specexec_cli.lab.papers.draw import grids

    table = {
        kind: [[rates[method, length, count].micro for count in beams] for length in lengths]
        for method, kind in _BEAM_SEARCHES.items()
    }
    return grids(f"Committed tokens per target pass, micro, {name}, temperature 0.6",
                 ("beams", beams), ("length", lengths), table)  # fmt: skip
