import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]

def cut_contexts(
    lens: Int32Array,
    query_start_loc: Int32Array,
    budget: int,
    largest: int,
    aligned: int,
    ranks: int,
    interleave: int,
    limit: int,
    /,
) -> tuple[bytearray, int, int, int, int, int] | int: ...
