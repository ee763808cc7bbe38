"""PTX that LLVM writes for mbarriers, bulk copies and tensor copies."""

from __future__ import annotations

import numpy as np
import pytest

from lowbit.pylib.emulator import Emulator
from lowbit.pylib.runtime.tensor_map import TensorMap

pytest.importorskip("llvmlite.binding")
from test_emulator_llvm import to_ptx

RNG = np.random.default_rng(8)


def copying_kernel() -> str:
    """Two rounds: thread 0 brings a box of a tensor and a row with it, all threads add up what came."""
    # As MLIR's nvvm.mbarrier.try_wait.parity is written.
    wait = r"{ .reg .pred P1; LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P1, [$0], $1, $2; @P1 bra.uni DONE; "
    wait += "bra.uni LAB_WAIT; DONE: }"
    nvvm, bar, far = "@llvm.nvvm", "ptr addrspace(3) @bar", "ptr addrspace(7)"
    bulk = f"{nvvm}.cp.async.bulk.global.to.shared.cluster"
    tensor = f"{nvvm}.cp.async.bulk.tensor.g2s.tile.2d"
    arrive = f"{nvvm}.mbarrier.arrive.expect.tx.scope.cta.space.cta"
    lines = [
        "@smem = addrspace(3) global [1280 x i8] poison, align 1024",
        "@bar = addrspace(3) global i64 poison, align 8",
        f"declare i32 {nvvm}.read.ptx.sreg.tid.x()",
        f"declare void {nvvm}.barrier0()",
        f"declare void {nvvm}.mbarrier.init.shared(ptr addrspace(3), i32)",
        f"declare void {nvvm}.fence.mbarrier_init.release.cluster()",
        f"declare i64 {arrive}(ptr addrspace(3), i32)",
        f"declare {{ i32, i1 }} {nvvm}.elect.sync(i32)",
        f"declare void {bulk}({far}, ptr addrspace(3), ptr addrspace(1), i32, i16, i64, i1, i1)",
        f"declare void {tensor}({far}, ptr addrspace(3), ptr, i32, i32, i16, i64, i1, i1, i32)",
        'define ptx_kernel void @k(ptr byval([128 x i8]) align 64 "nvvm.grid_constant" %map, ptr addrspace(1) %row,',
        '    ptr addrspace(1) %y) "nvvm.reqntid"="32" {',
        f"%tid = call i32 {nvvm}.read.ptx.sreg.tid.x()",
        "%elected = icmp eq i32 %tid, 0",
        "br i1 %elected, label %init, label %join",
        "init:",
        f"call void {nvvm}.mbarrier.init.shared({bar}, i32 1)",
        f"call void {nvvm}.fence.mbarrier_init.release.cluster()",
        "br label %join",
        "join:",
        f"call void {nvvm}.barrier0()",
        f"%far = addrspacecast ptr addrspace(3) @smem to {far}",
        f"%rowfar = getelementptr i8, {far} %far, i32 1024",
        "br label %loop",
        "loop:",
        "%i = phi i32 [ 0, %join ], [ %i1, %add ]",
        "%sum = phi i32 [ 0, %join ], [ %sum2, %add ]",
        f"%both = call {{ i32, i1 }} {nvvm}.elect.sync(i32 -1)",
        "%one = extractvalue { i32, i1 } %both, 1",
        "br i1 %one, label %copy, label %add",
        "copy:",
        f"call i64 {arrive}({bar}, i32 1280)",
        "%first = mul i32 %i, 8",
        f"call void {tensor}({far} %far, {bar}, ptr %map, i32 0, i32 %first, i16 0, i64 0, i1 0, i1 0, i32 0)",
        "%from = getelementptr [256 x i8], ptr addrspace(1) %row, i32 %i",
        f"call void {bulk}({far} %rowfar, {bar}, ptr addrspace(1) %from, i32 256, i16 0, i64 0, i1 0, i1 0)",
        "br label %add",
        "add:",
        f'call void asm sideeffect "{wait}", "r,r,r,~{{memory}}"({bar}, i32 %i, i32 1000000)',
        "%at = getelementptr i32, ptr addrspace(3) @smem, i32 %tid",
        *(
            f"%p{j} = getelementptr i8, ptr addrspace(3) %at, i32 {128 * j}\n%v{j} = load i32, ptr addrspace(3) %p{j}\n"
            f"%s{j} = add i32 %v{j}, {'%sum' if j == 0 else f'%s{j - 1}'}"
            for j in range(9)
        ),
        "%sum2 = add i32 %s8, 0",
        f"call void {nvvm}.barrier0()",
        "%i1 = add i32 %i, 1",
        "%more = icmp ult i32 %i1, 2",
        "br i1 %more, label %loop, label %end",
        "end:",
        "%yp = getelementptr i32, ptr addrspace(1) %y, i32 %tid",
        "store i32 %sum2, ptr addrspace(1) %yp",
        "ret void",
        "}",
    ]
    return "\n".join(lines)


@pytest.mark.parametrize("level", [0, 3])
def test_copies_counted_by_an_mbarrier(level: int) -> None:
    """The spellings of LLVM's intrinsics, and two loops of inline assembly with the same labels (unrolled)."""
    x, row, y = RNG.integers(0, 999, (16, 32)), RNG.integers(0, 999, (2, 64)), np.zeros(32, np.uint32)
    x, row = x.astype(np.uint32), row.astype(np.uint32)
    Emulator(to_ptx(copying_kernel(), level)).launch(
        "k", block=32, args=[TensorMap(x, "u32", x.shape, (8, 32)), row, y], racecheck=True
    )
    np.testing.assert_array_equal(y, x.sum(axis=0) + row[:, :32].sum(axis=0))
