"""An upper bound on the seconds that any cache can save, even one that knows all requests in advance.

Between two requests of a key lies an interval. To answer the second from the cache, its bytes must have been kept over
all of it, and at no moment may those that are kept be more than the capacity. Allowing parts of intervals makes this a
linear program, and every price on room gives a bound to it (weak duality): what all room would cost at that price, and
what each interval saves beyond its own cost. One price for all time is the well-known relaxation to a budget of size
times time; prices of their own for stretches of time, found by going downhill, bring the bound closer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from simulate_traces import Request

_STRETCHES = 200
_STEPS = 150


def most_saved(requests: Sequence[Request], capacity: int) -> float:
    """Return an upper bound on the seconds that a policy can save."""
    last: dict[str, int] = {}
    rows = []
    for position, request in enumerate(requests):
        if request.key in last and request.size <= capacity:
            rows.append((last[request.key], position, request.size, request.seconds))
        last[request.key] = position
    if not rows:
        return 0.0
    begin, end, size, seconds = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    everything = float(seconds.sum())
    edges = np.linspace(0, len(requests), min(_STRETCHES, len(requests)) + 1)
    room = np.diff(edges) * capacity
    price = np.full(len(room), _one_price(begin, end, size, seconds, capacity * len(requests)))
    best = everything
    for step in range(_STEPS):
        until = np.concatenate([[0.0], np.cumsum(price * np.diff(edges))])
        cost = size * (np.interp(end, edges, until) - np.interp(begin, edges, until))
        kept = seconds > cost
        best = min(best, float((price * room).sum() + (seconds - cost)[kept].sum()))
        used = _used(begin[kept], end[kept], size[kept], edges)
        # Room costs more where more is wanted than there is.
        price = price * np.exp(np.clip((used - room) / room, -1, 1) * 0.5 / (1 + step / 15))
    return best


def _one_price(begin: np.ndarray, end: np.ndarray, size: np.ndarray, seconds: np.ndarray, budget: float) -> float:
    """Return the seconds per byte and request that the last interval within the budget saves."""
    needed = size * (end - begin)
    density = seconds / needed
    order = np.argsort(-density)
    position = int(np.searchsorted(np.cumsum(needed[order]), budget))
    return float(density[order[position]]) if position < len(order) else float(density.min()) * 1e-6


def _used(begin: np.ndarray, end: np.ndarray, size: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the bytes times requests that the intervals take in each stretch."""
    # The integral of a step function that rises by a size at each beginning and falls by it at each end.
    moments = np.concatenate([begin, end])
    order = np.argsort(moments, kind="stable")
    moments, change = moments[order], np.concatenate([size, -size])[order]
    height = np.cumsum(change)
    area = np.concatenate([[0.0], np.cumsum(height[:-1] * np.diff(moments))]) if len(moments) else np.zeros(1)
    return np.diff(np.interp(edges, moments, area)) if len(moments) else np.zeros(len(edges) - 1)
