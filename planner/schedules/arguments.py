"""Checks shared by the schedules: every refusal names the argument, the element and what was expected."""

from __future__ import annotations

import operator
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import BadInput

Int32Array: TypeAlias = NDArray[np.int32]

INT32_MAX = 2**31 - 1


def int32_vector(name: str, values: ArrayLike) -> Int32Array:
    """`values` as a C-contiguous int32 vector; a list, a tuple or an integer array."""
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.ndim == 1:
        return values if values.flags.c_contiguous else np.ascontiguousarray(values)
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadInput(f"{name}: expected a one-dimensional list of integers ({error})") from None
    if array.ndim != 1:
        raise BadInput(f"{name}: expected one dimension, got {array.ndim}")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        # NumPy gives a mixed list one type: blame the element as the caller wrote it.
        raise BadInput(_not_integers(name, list(values) if isinstance(values, list | tuple) else array.tolist()))
    if isinstance(values, list | tuple) and any(isinstance(value, bool | np.bool_) for value in values):
        raise BadInput(_not_integers(name, list(values)))
    outside = np.flatnonzero((array > INT32_MAX) | (array < -INT32_MAX - 1))
    if outside.size:
        at = int(outside[0])
        raise BadInput(f"{name}[{at}]: expected an int32 value, got {array[at]}")
    return np.ascontiguousarray(array, np.int32)


def _not_integers(name: str, values: list[object]) -> str:
    for at, value in enumerate(values):
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            return f"{name}[{at}]: expected an integer, got {value!r}"
        if not -INT32_MAX - 1 <= value <= INT32_MAX:
            return f"{name}[{at}]: expected an int32 value, got {value}"
    return f"{name}: expected integers that fit int32"


def integer(name: str, value: object, least: int, most: int = INT32_MAX) -> int:
    """`value` as an int between `least` and `most`."""
    if isinstance(value, bool):
        raise BadInput(f"{name}: expected an integer, got {value}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # refusing what has no index is the point
    except TypeError:
        raise BadInput(f"{name}: expected an integer, got {value!r}") from None
    if not least <= number <= most:
        expected = f"at least {least}" if most == INT32_MAX and number < least else f"{least} to {most}"
        raise BadInput(f"{name}: expected {expected}, got {number}")
    return number


def power_of_two(name: str, value: object) -> int:
    number = integer(name, value, 1)
    if number & (number - 1):
        raise BadInput(f"{name}: expected a power of two, got {number}")
    return number


def choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise BadInput(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")
    return value


def check_indptr(name: str, indptr: Int32Array, requests: int, *, start: int | None = None) -> None:
    """Refuse an indptr of another length, one that falls, or one that does not start where it must."""
    if len(indptr) != requests + 1:
        raise BadInput(f"{name}: expected {requests + 1} entries for {requests} requests, got {len(indptr)}")
    first = int(indptr[0])
    if start is not None and first != start:
        raise BadInput(f"{name}[0]: expected {start}, got {first}")
    if first < 0:
        raise BadInput(f"{name}[0]: expected at least 0, got {first}")
    falls = np.flatnonzero(indptr[1:] < indptr[:-1])
    if falls.size:
        at = int(falls[0]) + 1
        raise BadInput(f"{name}[{at}]: expected at least {name}[{at - 1}] = {indptr[at - 1]}, got {indptr[at]}")
