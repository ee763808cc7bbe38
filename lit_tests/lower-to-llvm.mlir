// RUN: %lowbit-opt %s --lower-to-llvm | %filecheck %s

// Upstream's conversions, in one pass: a gpu.func becomes an llvm.func that NVPTX takes for a kernel.

// CHECK-LABEL: llvm.func @double
// CHECK-SAME:    (%[[X:.*]]: !llvm.ptr<1> {llvm.align = 16 : i64, llvm.noalias}, %[[N:.*]]: i32)
// CHECK-SAME:    nvvm.kernel, nvvm.reqntid = array<i32: 32, 1, 1>
gpu.module @double_module {
  gpu.func @double(%x: !llvm.ptr<1> {llvm.align = 16 : i64, llvm.noalias}, %n: i32) kernel
      attributes {nvvm.reqntid = array<i32: 32, 1, 1>} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    // The thread index has 32 bits, without detours through 64.
    // CHECK: %[[THREAD:.*]] = nvvm.read.ptx.sreg.tid.x
    // CHECK-NOT: {{trunc|ext}}
    %t = gpu.thread_id x
    %thread = arith.index_cast %t : index to i32
    %inside = arith.cmpi slt, %thread, %n : i32
    // Regions become branches.
    // CHECK: %[[INSIDE:.*]] = llvm.icmp "slt" %[[THREAD]], %[[N]]
    // CHECK: llvm.cond_br %[[INSIDE]]
    scf.if %inside {
      scf.for %i = %c0 to %n step %c1 : i32 {
        %a = llvm.getelementptr %x[%i] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, f32
        %v = llvm.load %a : !llvm.ptr<1> -> f32
        // CHECK: llvm.fadd
        %w = arith.addf %v, %v : f32
        llvm.store %w, %a : f32, !llvm.ptr<1>
        // The loop's own branch keeps LLVM from unrolling it.
        // CHECK: llvm.br {{.*}}loop_annotation
      } {loop_annotation = #llvm.loop_annotation<unroll = <disable = true>>}
    }
    // CHECK: nvvm.barrier
    gpu.barrier
    // CHECK: llvm.return
    gpu.return
  }
}

// What is passed by value stays in parameter memory: one copy for the grid, and its address is what the kernel uses.

// CHECK-LABEL: llvm.func @by_value
// CHECK-SAME:    (%{{.*}}: !llvm.ptr {llvm.align = 64 : i64, llvm.byval = !llvm.array<128 x i8>, nvvm.grid_constant},
// CHECK-SAME:     %{{.*}}: f32)
gpu.module @by_value_module {
  gpu.func @by_value(%map: !llvm.ptr {llvm.align = 64 : i64, llvm.byval = !llvm.array<128 x i8>}, %scale: f32) kernel {
    nvvm.prefetch tensormap, %map : !llvm.ptr
    gpu.return
  }
}
