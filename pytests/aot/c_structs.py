"""The structs of lowbit.h for ctypes, which needs nothing else."""

from __future__ import annotations

import ctypes


class Given(ctypes.Structure):
    """lowbit_given"""

    _fields_ = (("name", ctypes.c_char_p), ("type", ctypes.c_int), ("data", ctypes.c_void_p), ("count", ctypes.c_int64))


class Call(ctypes.Structure):
    """lowbit_call"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("m", ctypes.c_int64),
        ("x_rows", ctypes.c_int64),
        ("inputs", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
        ("flags", ctypes.c_uint),
    )
