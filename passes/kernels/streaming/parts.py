"""The parts of which a family composes its kernel: one of each row, for `streaming_kernel`.

| part | choices |
|---|---|
| `work`: which rows, part of k and tokens a block has | `Work`: by place, `ExpertWork`: by a table, `TopKWork`: by id |
| `activations`: how x comes to shared memory | `activations_of`: swizzled for wgmma, else padded rows |
| `engine`: how a warp multiplies its step | `Mma`, `Wgmma`, `InPlaceWgmma`, `SpreadMma`, `LimbMma`, `Bytes` |
| `ending`: how sums of warps and blocks become y | `Ending`; `SumOfExperts` |
"""

from lowbit.passes.kernels.streaming.activations import activations_of
from lowbit.passes.kernels.streaming.eight_bit import Bytes
from lowbit.passes.kernels.streaming.epilogue import Ending, SumOfExperts
from lowbit.passes.kernels.streaming.kernel import streaming_kernel
from lowbit.passes.kernels.streaming.limbs import LimbMma
from lowbit.passes.kernels.streaming.mma import Mma
from lowbit.passes.kernels.streaming.spread import SpreadMma
from lowbit.passes.kernels.streaming.wgmma import InPlaceWgmma, Wgmma
from lowbit.passes.kernels.streaming.work import ExpertWork, TopKWork, Work

__all__ = [
    "Bytes",
    "Ending",
    "ExpertWork",
    "InPlaceWgmma",
    "LimbMma",
    "Mma",
    "SpreadMma",
    "SumOfExperts",
    "TopKWork",
    "Wgmma",
    "Work",
    "activations_of",
    "streaming_kernel",
]
