"""Kernels of the emulator with shared memory, and a check of what they are refused for."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_kernel import run

from lowbit.dialect.errors import EmulatorError

RNG = np.random.default_rng(4)
#: %r0 = tid, %rd0 = p0 + 16 tid
TID16 = "mov.u32 %r0, %tid.x; ld.param.u64 %rd9, [p0]; mad.wide.u32 %rd0, %r0, 16, %rd9;"
SMEM = ".shared .align 16 .b8 smem[1024];"


def fails(message: str, body: str, *args: object, **options: object) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(body, args, **options)  # type: ignore[arg-type]
