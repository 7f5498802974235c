"""Reading NumPy's ``.npy`` bytes that come from elsewhere, without trusting them."""

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

READ_HEADER: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npy(data: bytes, dtypes: Sequence[type[np.generic]]) -> np.ndarray[Any, Any]:
    """Return the array in ``data``, in memory of its own.

    Parameters
    ----------
    data : bytes
        A whole ``.npy`` file. Its header must promise exactly the bytes that follow, so that a claim of terabytes
        reserves nothing; Python objects are never unpickled.
    dtypes : sequence of NumPy scalar types
        The types that are allowed, in this machine's byte order.

    Raises
    ------
    ValueError
        One line, for anything else.
    """
    stream = io.BytesIO(data)
    try:
        shape, fortran, dtype = READ_HEADER[np.lib.format.read_magic(stream)](stream)
    except Exception as error:  # the header is a Python literal, and broken ones raise whatever the parser likes
        raise ValueError(f"no readable header ({type(error).__name__})") from error
    allowed = [np.dtype(each) for each in dtypes]
    if dtype not in allowed:
        raise ValueError(f"{dtype}, needed {' or '.join(map(str, allowed))}")
    if math.prod(shape) * dtype.itemsize != len(data) - stream.tell():
        raise ValueError(f"shape {shape} and {len(data)} bytes do not agree")
    flat = np.frombuffer(data, dtype=dtype, offset=stream.tell())
    try:
        return flat.reshape(shape, order="F" if fortran else "C").copy()
    except (OverflowError, TypeError, MemoryError) as error:  # such as (0, 10**30), which has no elements
        raise ValueError(f"no array has the shape {str(shape)[:80]}") from error
