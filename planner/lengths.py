"""Reading per-request lengths from whatever a caller holds, with errors that name the element."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import BadInput

Int32Array: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
UInt8Array: TypeAlias = npt.NDArray[np.uint8]
Lengths: TypeAlias = Sequence[int] | npt.NDArray[np.integer]

UNKNOWN = -1  # a length that nobody told: compares as "prefill done" and as "not computed at admission"
INT32_MAX = int(np.iinfo(np.int32).max)


def read_lengths(name: str, values: object, rows: int | None = None, *, unknown_allowed: bool = False) -> Int32Array:
    """Validate one length per request and return a read-only int32 copy.

    `values`: list, tuple or 1-D integer array. With `unknown_allowed`, `None` elements become `UNKNOWN`.
    Raises `BadInput` naming the first offending element.
    """
    array = _as_integers(name, values, unknown_allowed)
    if rows is not None and array.size != rows:
        raise BadInput(f"{name}: expected {rows} elements, one for each of query_lens, got {array.size}")
    floor = UNKNOWN if unknown_allowed and not isinstance(values, np.ndarray) else 0
    if array.size:
        if int(array.min()) < floor:
            index = int((array < floor).argmax())
            raise BadInput(f"{name}[{index}]: expected >= 0, got {array[index]}")
        if int(array.max()) > INT32_MAX:
            index = int((array > INT32_MAX).argmax())
            raise BadInput(f"{name}[{index}]: expected <= {INT32_MAX}, got {array[index]}")
    out: Int32Array = array.astype(np.int32)
    out.setflags(write=False)
    return out


def _as_integers(name: str, values: object, unknown_allowed: bool) -> npt.NDArray[np.integer]:
    if isinstance(values, np.ndarray):
        array = values
    elif isinstance(values, list | tuple):
        return _from_elements(name, values, unknown_allowed)
    else:
        try:
            array = np.asarray(values)  # a tensor on the host converts; one on a device refuses to
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadInput(f"{name}: expected a list or array on the host, got {type(values).__name__}") from error
    if array.ndim != 1:
        raise BadInput(f"{name}: expected one dimension, got {array.ndim}")
    if array.dtype.kind not in "iu":
        if array.size:
            raise BadInput(f"{name}[0]: expected an integer, got {array.flat[0]!r} ({array.dtype})")
        return np.zeros(0, dtype=np.int64)
    return array


def _from_elements(
    name: str, values: list[object] | tuple[object, ...], unknown_allowed: bool
) -> npt.NDArray[np.integer]:
    numbers: list[int] = []
    for index, value in enumerate(values):
        if value is None and unknown_allowed:
            numbers.append(UNKNOWN)
        elif isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            raise BadInput(f"{name}[{index}]: expected an integer, got {value!r}")
        elif value < 0:
            raise BadInput(f"{name}[{index}]: expected >= 0, got {value}")
        elif value > INT32_MAX:
            raise BadInput(f"{name}[{index}]: expected <= {INT32_MAX}, got {value}")
        else:
            numbers.append(int(value))
    return np.array(numbers, dtype=np.int64)


def read_flags(name: str, values: object, rows: int) -> BoolArray:
    """Validate one truth value per request (bool, or 0 and 1) and return a read-only bool copy."""
    if isinstance(values, list | tuple):
        for index, value in enumerate(values):  # one by one: NumPy gives a mixed list one type
            if not isinstance(value, bool | np.bool_) and not (isinstance(value, int | np.integer) and value in (0, 1)):
                raise BadInput(f"{name}[{index}]: expected true or false, got {value!r}")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"{name}: expected a list or array on the host, got {type(values).__name__}") from error
    if array.ndim != 1 or array.size != rows:
        raise BadInput(f"{name}: expected {rows} elements, one for each of query_lens, got shape {list(array.shape)}")
    if array.dtype.kind != "b" and array.size:
        odd = (
            ~np.isin(array, (0, 1)) if array.dtype.kind in "iu" else np.array([not isinstance(v, bool) for v in array])
        )
        if odd.any():
            index = int(odd.argmax())
            raise BadInput(f"{name}[{index}]: expected true or false, got {array[index]}")
    out: BoolArray = array.astype(np.bool_)
    out.setflags(write=False)
    return out


def read_count(name: str, value: object, least: int) -> int:
    """Validate one integer setting."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise BadInput(f"{name}: expected an integer, got {value!r}")
    if not least <= value <= INT32_MAX:
        raise BadInput(f"{name}: expected {least} to {INT32_MAX}, got {value}")
    return int(value)
