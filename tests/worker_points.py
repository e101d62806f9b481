"""A worker that stands still at a point of its work, where a test kills or stops it."""

from __future__ import annotations

import pkgutil
import sys
import threading
from functools import wraps
from itertools import count
from typing import Any


def stand_at(point: str) -> None:
    """Has this process stand still for good at a point, and say so.

    Args:
        point: a function as `module:name`, and the number of the call in front of which it stands,
            or behind which, as in `module:Class.name 3` or `module:name behind 1`.
    """
    name, *where, number = point.split()
    module, _, path = name.partition(":")
    owner, _, called = path.rpartition(".")
    holds = pkgutil.resolve_name(f"{module}:{owner}" if owner else module)
    plain, calls = getattr(holds, called), count(1)

    @wraps(plain)
    def stands(*args: Any, **kwargs: Any) -> Any:
        here = next(calls) == int(number)
        if here and not where:
            _stand(point)
        found = plain(*args, **kwargs)
        if here and where:
            _stand(point)
        return found

    setattr(holds, called, stands)


def _stand(point: str) -> None:
    print(f"stands at {point}", file=sys.stderr, flush=True)
    threading.Event().wait()
