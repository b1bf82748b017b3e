"""Arrays at chosen places of memory, for kernels that must stay inside their buffers. Imports nothing of ours."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import numpy as np


def at_end(array: np.ndarray) -> np.ndarray:
    """A copy whose last byte is followed by a page that must not be touched."""
    return _guarded(array, lambda room, size: room - size)


def at_start(array: np.ndarray) -> np.ndarray:
    """A copy whose first byte is preceded by a page that must not be touched."""
    return _guarded(array, lambda room, size: 0)


def unaligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address that has the alignment of one element and no more."""
    raw = np.empty(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + array.itemsize
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def _guarded(array: np.ndarray, place: Callable[[int, int], int]) -> np.ndarray:
    page = mmap.PAGESIZE
    room = max(-(-array.nbytes // page), 1) * page
    memory = mmap.mmap(-1, room + 2 * page)
    base = np.frombuffer(memory, np.uint8)  # keeps the map alive
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    for guard in (0, room + page):
        assert mprotect(ctypes.c_void_p(base.ctypes.data + guard), ctypes.c_size_t(page), 0) == 0
    start = page + place(room, array.nbytes)
    out = base[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out
