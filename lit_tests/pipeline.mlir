// RUN: %lowbit-opt %s --plan-packing --select-schedule=target=sm_90a,row-blocks=1,warps-k=2,step-k=64,num_stages=2 --expand-matmul --pipeline-copies --lower-tiles=target=sm_90a --lower-dequant --lower-to-llvm | %filecheck %s
// RUN: %lowbit-opt %s --plan-packing --select-schedule=row-blocks=1,warps-k=2,step-k=64,num_stages=2 --expand-matmul --pipeline-copies --stop-after=expand-matmul | %filecheck %s --check-prefix=TILE

// The whole way, from a matmul on tensors to the llvm dialect.

// --stop-after leaves out the passes behind the one it names.
// TILE:     lowbit.program
// TILE:     num_stages = 2

// CHECK-NOT:   lowbit.mma
// CHECK-LABEL: llvm.func @matmul
// CHECK-SAME:    lowbit.params = ["x", "codes", "scales", "y", "m"]
// CHECK-SAME:    nvvm.reqntid = array<i32: 64, 1, 1>

// The first weights are asked for before the kernel in front of this one has ended; activations after it has.
// CHECK:         nvvm.cp.async.shared.global
// CHECK:         nvvm.griddepcontrol wait
// CHECK:         nvvm.cp.async.shared.global
// CHECK:         nvvm.cp.async.commit.group

// The loop: a round has arrived, the next is asked for, u4 is decoded (a mask, no subtraction), multiplied, scaled.
// CHECK:         nvvm.cp.async.wait.group 0
// CHECK:         nvvm.cp.async.shared.global
// CHECK:         [[PAIR:%[0-9]+]] = llvm.and
// CHECK-NEXT:    llvm.bitcast [[PAIR]] : i32 to vector<2xf16>
// CHECK-NOT:     llvm.fadd {{.*}} : vector<2xf16>
// CHECK:         nvvm.ldmatrix
// CHECK:         nvvm.mma.sync
// CHECK:         llvm.intr.fma({{.*}}) : (f32, f32, f32) -> f32

// CHECK:         llvm.store {{.*}} !llvm.ptr<1>
// CHECK-NOT:     "lowbit.
!weight = !lowbit.packed<[64, 512], #lowbit.format<"u4", []>, 128, "none", "f16">
func.func @matmul(%x: tensor<?x512xf16>, %w: !weight) -> tensor<?x64xf16> {
  %y = lowbit.matmul %x, %w : tensor<?x512xf16>, !weight -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}
