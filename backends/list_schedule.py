"""When the programs of a grid end: every slot of the device takes the next program of the grid once it is free.

A heap over the slots answers that program by program. Here many are settled at once: program i starts when the
(i - slots)-th of all ends comes, because no later program ends before i starts, so start times are the fixed point of
`starts[slots:] = sorted(starts + durations)[:-slots]`, and the last ends of the slots are what remains. Iterating from
starts wave by wave arrives there in about two rounds a wave; each round makes at least the next start right. Exact up
to EXACT programs; of a larger grid those before the last EXACT are shared out as their ends in waves are, which moves
the last end by less than the longest duration.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]

AT_ONCE = 1536  # programs settled together: sorting more at once costs more than starting again with their ends
ROUNDS = 40  # what takes longer to settle (very short programs among very long ones) is left to a heap
EXACT = 4096


def last_ends(durations: Float32Array, slots: int) -> Float32Array:
    """When each of `slots` slots has ended its last program, ascending [slots] float32; 0 where it had none.

    `durations` [programs] float32 > 0, in the order of the grid; multiples of a power of two stay exact.
    """
    count = len(durations)
    if count <= slots:
        ends = np.zeros(slots, np.float32)
        ends[slots - count :] = np.sort(durations)
        return ends
    if count > EXACT + slots:
        ends, durations = _shared_out(durations[:-EXACT], slots), durations[-EXACT:]
        first = 0
    else:
        first = min(count, max(AT_ONCE, 2 * slots))
        ends = _settled(durations[:first], _by_waves(durations[:first], slots), slots)
    for begin in range(first, len(durations), AT_ONCE):
        chunk = durations[begin : begin + AT_ONCE]
        starts = np.concatenate([np.zeros(slots, np.float32), _by_waves(chunk, slots) + ends.mean()])
        # What is still running counts as programs that began at 0.
        ends = _settled(np.concatenate([ends, chunk]), starts, slots)
    return ends


def _by_waves(durations: Float32Array, slots: int) -> Float32Array:
    """Starts [programs] if a wave of `slots` programs began when the one before has ended on average."""
    count = len(durations)
    waves = -(-count // slots)
    padded = np.zeros(waves * slots, np.float32)
    padded[:count] = durations
    means = padded.reshape(waves, slots).sum(1) / np.float32(slots)
    return np.repeat(np.cumsum(means) - means, slots)[:count]


def _settled(durations: Float32Array, starts: Float32Array, slots: int) -> Float32Array:
    """Last ends of the slots; the first `slots` starts are right, the others a guess that is improved in place."""
    later = len(durations) - slots
    ends, behind = np.empty_like(durations), starts[slots:]
    for _ in range(ROUNDS):
        np.add(starts, durations, out=ends)
        ends.sort()
        if (ends[:later] == behind).all():
            return ends[later:]
        behind[:] = ends[:later]
    return by_heap(durations, slots)


def by_heap(durations: Float32Array, slots: int) -> Float32Array:
    """`last_ends`, program by program."""
    free = [0.0] * slots
    for duration in durations.tolist():
        heapq.heapreplace(free, free[0] + duration)
    return np.sort(np.array(free, np.float32))


def _shared_out(durations: Float32Array, slots: int) -> Float32Array:
    """About the last ends of programs that more follow: those of the waves, moved so that all work is in them."""
    ends = np.sort(_by_waves(durations, slots) + durations)[-slots:]
    missing = (float(durations.sum(dtype=np.float64)) - float(ends.sum(dtype=np.float64))) / slots
    return np.maximum(ends + np.float32(missing), 0)
