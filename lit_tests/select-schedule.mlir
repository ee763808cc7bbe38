// RUN: %lowbit-opt %s --select-schedule=tokens=16,row_blocks=1,warps-n=2,warps-k=4,step_k=64,num_stages=2,split_k=3 | %filecheck %s
// RUN: %lowbit-opt %s --select-schedule=target=sm_90a | %filecheck %s --check-prefix=DEFAULT
// RUN: %lowbit-opt %s --select-schedule=family=decode_integer,tokens=1,step_k=128 | %filecheck %s --check-prefix=INTEGER

// Choices given as options go to every matmul that has none. Dashes and underscores mean the same.
// CHECK-LABEL: func.func @free
// CHECK:         schedule = {chains = 1, cluster = 1, family = "decode"
// CHECK:           refill = "before_mma",
// CHECK:           row_blocks = 1, split_k = 3, spread_k = false, step_k = 64, tokens = 16, warps_k = 4, warps_n = 2, wgmma = false}

// Without options the pass chooses.
// DEFAULT-LABEL: func.func @free
// DEFAULT:         schedule = {
// DEFAULT:         step_k = {{(64|128)}}, tokens = 8

// A kernel family is chosen by its name.
// INTEGER-LABEL: func.func @free
// INTEGER:         schedule = {{.*}}family = "decode_integer"
// INTEGER:         step_k = 128, tokens = 1
!weight = !lowbit.packed<[64, 1024], #lowbit.format<"u4", []>, 128, "int", "f16">
func.func @free(%x: tensor<?x1024xf16>, %w: !weight) -> tensor<?x64xf16> {
  %y = lowbit.matmul %x, %w : tensor<?x1024xf16>, !weight -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}

// A schedule that is there stays; what it does not name is the default.
// CHECK-LABEL:   func.func @fixed
// CHECK:           schedule = {step_k = 64, tokens = 32}
// DEFAULT-LABEL: func.func @fixed
// DEFAULT:         schedule = {step_k = 64, tokens = 32}
func.func @fixed(%x: tensor<?x1024xf16>, %w: !weight) -> tensor<?x64xf16> {
  %y = lowbit.matmul %x, %w {schedule = {step_k = 64, tokens = 32}} : tensor<?x1024xf16>, !weight -> tensor<?x64xf16>
  return %y : tensor<?x64xf16>
}
