"""The operations of the `lowbit` dialect.

Tensor level: `matmul`, `permute`, `quantize`, `quantized_matmul`, `dequantize`, `prepack`. Tile level: a `program` is
what one block does with tiles in device memory, shared memory and registers; scalars and loops are upstream's arith and
scf. Register level: `decode_pair`, `decode_shifted_pair` and `lookup_pair` turn the words of a thread into a pair of
numbers, and are all that is left of a format when tiles are gone, but for bytes.

Verifiers say what was expected and what came. Accesses carry a `boundary`, one word per dim of the tile:

    "none"   the index is always inside
    "clamp"  an index beyond the end reads the last element
    "zero"   an element beyond the end reads as zero
    "skip"   an element beyond the end is not touched
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir, load_dialect
from lowbit.dialect.ops.accumulators import (
    AccumulateOp,
    AccumulatorOp,
    AddScaledOp,
    AwaitProductsOp,
    ClearAccumulatorOp,
    ReadAccumulatorOp,
)
from lowbit.dialect.ops.boxes import CopyBoxOp, OneThreadOp
from lowbit.dialect.ops.codes import (
    BYTES,
    DecodeBytesOp,
    DecodeOp,
    EncodeBytesOp,
    EncodeFragmentsOp,
    EncodeOp,
    LookupBytesOp,
    LookupOp,
)
from lowbit.dialect.ops.elementwise import (
    COMPARISONS,
    AbsOp,
    AddOp,
    CastOp,
    CompareOp,
    DivOp,
    ExpOp,
    FmaOp,
    MaxOp,
    MinOp,
    MulOp,
    NegOp,
    RaiseBitsOp,
    ReciprocalOp,
    RoundToOp,
    SelectOp,
    SqrtOp,
    SubOp,
    TanhOp,
    raised_power,
)
from lowbit.dialect.ops.integer_products import JoinLimbsOp, LimbMmaOp, LimbSumsOp, SplitLimbsOp
from lowbit.dialect.ops.memory import (
    AllocSharedOp,
    AllocSignalsOp,
    ArriveOp,
    AwaitOp,
    BarrierOp,
    CommitOp,
    CopyAsyncOp,
    CopyPaddedOp,
    FillTableOp,
    FreeSharedOp,
    LastArrivalOp,
    OthersArrivedOp,
    PeerOp,
    PrefetchOp,
    StageOp,
    WaitOp,
)
from lowbit.dialect.ops.outliers import (
    CURSOR,
    AddOutliersOp,
    CopyLinesOp,
    CopyOutliersOp,
    EraseOutliersOp,
    FirstOutliersOp,
    IndexOutliersOp,
    LoadOutliersOp,
    ScatterOutliersOp,
    SparseMmaOp,
    SparseStepOp,
    SparseVectorOp,
    TransposeOp,
)
from lowbit.dialect.ops.pipelines import ConcurrentOp, PipelineOp
from lowbit.dialect.ops.products import MmaOp, OffsetSumsOp, RowSumsOp, WarpgroupMmaOp, WarpgroupRowSumsOp
from lowbit.dialect.ops.programs import (
    MOST_BLOCKS,
    BlockCountOp,
    BlockIdOp,
    GlobalViewOp,
    GridLaunchOp,
    GridWaitOp,
    ProgramOp,
    ReturnOp,
)
from lowbit.dialect.ops.registers import DecodePairOp, DecodeShiftedPairOp, LookupPairOp
from lowbit.dialect.ops.sends import SendOp
from lowbit.dialect.ops.tensors import DequantizeOp, MatmulOp, PermuteOp, PrepackOp, QuantizedMatmulOp, QuantizeOp
from lowbit.dialect.ops.tiles import (
    ConstantOp,
    DiagonalOp,
    GatherOp,
    LoadMatrixOp,
    LoadOp,
    MaterializeOp,
    ReduceOp,
    ReshapeOp,
    SliceOp,
    SplatOp,
    StoreOp,
    ViewOp,
)
from lowbit.dialect.types import Lowbit

__all__ = [
    "BYTES",
    "COMPARISONS",
    "CURSOR",
    "MOST_BLOCKS",
    "AbsOp",
    "AccumulateOp",
    "AccumulatorOp",
    "AddOp",
    "AddOutliersOp",
    "AddScaledOp",
    "AllocSharedOp",
    "AllocSignalsOp",
    "ArriveOp",
    "AwaitOp",
    "AwaitProductsOp",
    "BarrierOp",
    "BlockCountOp",
    "BlockIdOp",
    "CastOp",
    "ClearAccumulatorOp",
    "CommitOp",
    "CompareOp",
    "ConcurrentOp",
    "ConstantOp",
    "CopyAsyncOp",
    "CopyBoxOp",
    "CopyLinesOp",
    "CopyOutliersOp",
    "CopyPaddedOp",
    "DecodeBytesOp",
    "DecodeOp",
    "DecodePairOp",
    "DecodeShiftedPairOp",
    "DequantizeOp",
    "DiagonalOp",
    "DivOp",
    "EncodeBytesOp",
    "EncodeFragmentsOp",
    "EncodeOp",
    "EraseOutliersOp",
    "ExpOp",
    "FillTableOp",
    "FirstOutliersOp",
    "FmaOp",
    "FreeSharedOp",
    "GatherOp",
    "GlobalViewOp",
    "GridLaunchOp",
    "GridWaitOp",
    "IndexOutliersOp",
    "JoinLimbsOp",
    "LastArrivalOp",
    "LimbMmaOp",
    "LimbSumsOp",
    "LoadMatrixOp",
    "LoadOp",
    "LoadOutliersOp",
    "LookupBytesOp",
    "LookupOp",
    "LookupPairOp",
    "MaterializeOp",
    "MatmulOp",
    "MaxOp",
    "MinOp",
    "MmaOp",
    "MulOp",
    "NegOp",
    "OffsetSumsOp",
    "OneThreadOp",
    "OthersArrivedOp",
    "PeerOp",
    "PermuteOp",
    "PipelineOp",
    "PrefetchOp",
    "PrepackOp",
    "ProgramOp",
    "QuantizeOp",
    "QuantizedMatmulOp",
    "RaiseBitsOp",
    "ReadAccumulatorOp",
    "ReciprocalOp",
    "ReduceOp",
    "ReshapeOp",
    "ReturnOp",
    "RoundToOp",
    "RowSumsOp",
    "ScatterOutliersOp",
    "SelectOp",
    "SendOp",
    "SliceOp",
    "SparseMmaOp",
    "SparseStepOp",
    "SparseVectorOp",
    "SplatOp",
    "SplitLimbsOp",
    "SqrtOp",
    "StageOp",
    "StoreOp",
    "SubOp",
    "TanhOp",
    "TransposeOp",
    "ViewOp",
    "WaitOp",
    "WarpgroupMmaOp",
    "WarpgroupRowSumsOp",
    "raised_power",
    "register",
]


def register(context: ir.Context) -> None:
    """Make the dialect known in a context."""
    with context, ir.Location.unknown():
        load_dialect(Lowbit)
