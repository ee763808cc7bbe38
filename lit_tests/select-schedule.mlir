// RUN: %lowbit-opt %s --select-schedule=tokens=16,row_blocks=1,warps-n=2,warps-k=4,step_k=64,num_stages=2,split_k=3 | %filecheck %s
// RUN: %lowbit-opt %s --select-schedule=target=sm_90a | %filecheck %s --check-prefix=DEFAULT
// RUN: %lowbit-opt %s --select-schedule=family=decode_integer,tokens=1,step_k=128 | %filecheck %s --check-prefix=INTEGER

// Choices given as options go to every matmul that has none. Dashes and underscores mean the same.
// CHECK-LABEL: func.func @free
// CHECK:         schedule = {cluster = 1 : i64, family = "decode"
// CHECK-SAME:      refill = "before_mma", row_blocks = 1 : i64, split_k = 3 : i64, spread_k = false, step_k = 64 : i64, tokens = 16 : i64, warps_k = 4 : i64, warps_n = 2 : i64, wgmma = false}

// Without options the pass chooses.
// DEFAULT-LABEL: func.func @free
// DEFAULT:         schedule = {{.*}}step_k = {{(64|128)}} : i64, tokens = 8 : i64

// A kernel family is chosen by its name.
// INTEGER-LABEL: func.func @free
// INTEGER:         schedule = {{.*}}family = "decode_integer"{{.*}}step_k = 128 : i64, tokens = 1 : i64
!weight = !lowbit.packed<[64, 1024], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @free(%x: tensor<?x1024xf16>, %w: !weight) -> tensor<?x64xf16> {
  %y = "lowbit.matmul"(%x, %w) {operandSegmentSizes = array<i32: 1, 1, 0>} : (tensor<?x1024xf16>, !weight) -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// A schedule that is there stays; what it does not name is the default.
// CHECK-LABEL:   func.func @fixed
// CHECK:           schedule = {step_k = 64 : i64, tokens = 32 : i64}
// DEFAULT-LABEL: func.func @fixed
// DEFAULT:         schedule = {step_k = 64 : i64, tokens = 32 : i64}
func.func @fixed(%x: tensor<?x1024xf16>, %w: !weight) -> tensor<?x64xf16> {
  %y = "lowbit.matmul"(%x, %w) {schedule = {step_k = 64, tokens = 32}, operandSegmentSizes = array<i32: 1, 1, 0>}
    : (tensor<?x1024xf16>, !weight) -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}
