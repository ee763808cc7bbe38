"""Programs in LLVM IR and in the llvm dialect, which tests of the toolchain translate."""

from __future__ import annotations

from lowbit.dialect.bindings import ir


def parse(body: str, arguments: str = "%i: i32, %p: !llvm.ptr<3>, %g: !llvm.ptr<1>") -> ir.Module:
    return ir.Module.parse(f"llvm.func @k({arguments}) attributes {{nvvm.kernel}} {{\n{body}\nllvm.return }}")


SCALE = """
define ptx_kernel void @scale(ptr addrspace(1) %x, ptr addrspace(1) %y, i32 %n) {
entry:
  br label %loop
loop:
  %i = phi i32 [ 0, %entry ], [ %next, %loop ]
  %from = getelementptr float, ptr addrspace(1) %x, i32 %i
  %value = load float, ptr addrspace(1) %from
  %scaled = fmul float %value, 1.000000e-01
  %to = getelementptr float, ptr addrspace(1) %y, i32 %i
  store float %scaled, ptr addrspace(1) %to
  %next = add i32 %i, 1
  %more = icmp slt i32 %next, %n
  br i1 %more, label %loop, label %exit UNROLL
exit:
  ret void
}
!0 = distinct !{!0, !1}
!1 = !{!"llvm.loop.unroll.count", i32 4}
"""
PLAIN = SCALE.replace("UNROLL", "")
