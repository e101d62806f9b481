"""Expected seconds per token, in the long run, of the three ways to decode.

One acceptance rate for every position, independent of the others; enough target servers for DSI.
Arguments everywhere: target_s, draft_s (seconds of one forward pass), acceptance (0 <= a <= 1),
lookahead (draft tokens per verification, 1 or more).
Source: Timor et al., arXiv:2405.14105; speculative inference: Leviathan et al., arXiv:2211.17192.
"""

from __future__ import annotations

import math


def autoregressive_s(target_s: float) -> float:
    """One target pass per token."""
    return target_s


def speculative_s(target_s: float, draft_s: float, acceptance: float, lookahead: int) -> float:
    """(k c + t)(1 - a) / (1 - a^(k+1)): an iteration over its expected committed tokens."""
    return (lookahead * draft_s + target_s) / _committed(acceptance, lookahead)


def _committed(acceptance: float, lookahead: int) -> float:
    """Expected tokens of an iteration of SI: 1 + a + ... + a^k."""
    if acceptance == 1:
        return lookahead + 1
    return (1 - acceptance ** (lookahead + 1)) / (1 - acceptance)


def dsi_s(target_s: float, draft_s: float, acceptance: float, lookahead: int) -> float:
    """(1 - a)(t + c k a / (1 - a^k)): only a rejection waits for the target.

    After x accepted tokens the rejection is known when the block that holds the last of them
    has been verified, ceil(x / k) k c + t after the last restart. Needs k c <= t and
    servers_needed() servers. With k = 1 it is the paper's Proposition 1.
    """
    if acceptance == 0:
        return target_s
    if acceptance == 1:
        return draft_s
    blocks = acceptance / (1 - acceptance**lookahead)
    return (1 - acceptance) * (target_s + draft_s * lookahead * blocks)


def dsi_bound_s(target_s: float, draft_s: float, acceptance: float, tokens: int) -> float:
    """t1 p (N - 1) + t2 ((1 - p)(N - 1) + 1): seconds of a text of N tokens, at most and expected.

    Proposition 1: lookahead 1 and as many servers as are wanted.
    """
    before_last = tokens - 1
    accepted = acceptance * before_last
    return draft_s * accepted + target_s * (before_last - accepted + 1)


def servers_needed(target_s: float, draft_s: float, lookahead: int) -> int:
    """Fewest target servers that never keep a block waiting: ceil(t / (k c))."""
    return max(1, math.ceil(target_s / (lookahead * draft_s) - 1e-9))
