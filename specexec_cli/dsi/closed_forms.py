"""Expected seconds per token, in the long run, of the three ways to decode.

The formulas assume that every position is accepted at the same rate, independently of the others,
and that DSI has enough target servers.

Args of all functions, with their names in the formulas:
    target_s: t, seconds of a forward pass of the target.
    draft_s: c, seconds of a forward pass of the draft model.
    acceptance: a, acceptance rate, 0 to 1.
    lookahead: k, draft tokens before each verification, 1 or more.
Source: Timor et al., arXiv:2405.14105; speculative inference (SI): Leviathan et al.,
    arXiv:2211.17192.
"""

from __future__ import annotations

import math


def speculative_s(target_s: float, draft_s: float, acceptance: float, lookahead: int) -> float:
    """(k c + t)(1 - a) / (1 - a^(k+1)): seconds of an iteration / its expected tokens."""
    return (lookahead * draft_s + target_s) / _committed(acceptance, lookahead)


def _committed(acceptance: float, lookahead: int) -> float:
    """Expected tokens of an iteration of SI: 1 + a + ... + a^k."""
    if acceptance == 1:
        return lookahead + 1
    return (1 - acceptance ** (lookahead + 1)) / (1 - acceptance)


def dsi_s(target_s: float, draft_s: float, acceptance: float, lookahead: int) -> float:
    """(1 - a)(t + c k a / (1 - a^k)): DSI waits for the target only at a rejection.

    The rejection after x accepted tokens is known when the block with the last of them has been
    verified, ceil(x / k) k c + t after the last restart. Valid for k c <= t and with
    servers_needed() servers. With k = 1 it is the paper's Proposition 1.
    """
    if acceptance == 0:
        return target_s
    if acceptance == 1:
        return draft_s
    blocks = acceptance / (1 - acceptance**lookahead)
    return (1 - acceptance) * (target_s + draft_s * lookahead * blocks)


def servers_needed(target_s: float, draft_s: float, lookahead: int) -> int:
    """ceil(t / (k c)): the fewest target servers with which no block waits. Source: section 3.1."""
    return max(1, math.ceil(target_s / (lookahead * draft_s) - 1e-9))
