// RUN: %lowbit-opt %s --split-input-file --pipeline-copies | %filecheck %s

// Copies of a loop run ahead of its computation.

!x = !lowbit.global<[16, 64], f16, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[1, 64], f16, [64, 1], 0>
!tile = !lowbit.reg<[1, 64], f16, "spatial(1, 32).local(1, 2)">

// Three stages: the buffer becomes three.
// CHECK: !shared_3x1x64xf16 = !lowbit.shared<[3, 1, 64], f16, [64, 64, 1], 0>
// CHECK-LABEL: lowbit.program
// CHECK-SAME:       (%[[X:.*]]: !llvm.ptr<1>, %[[N:.*]]: i32)
// CHECK:         %[[BUFFERS:.*]] = lowbit.alloc_shared : !shared_3x1x64xf16
// CHECK-NOT:     lowbit.alloc_shared

// Prologue: the copies of the first two rounds, if there are so many, each a group of its own.
// CHECK:         %[[ONE:.*]] = arith.cmpi slt, %c0_i32{{.*}}, %[[N]]
// CHECK-NEXT:    scf.if %[[ONE]] {
// CHECK:           %[[FIRST:.*]] = lowbit.stage %[[BUFFERS]], %c0_i32{{.*}}
// CHECK-NEXT:      lowbit.copy_async %{{.*}}[%c0_i32{{.*}}, %{{.*}}], %[[FIRST]]
// CHECK-NEXT:    }
// CHECK-NEXT:    %[[TWO:.*]] = arith.cmpi slt, %{{.*}}, %[[N]]
// CHECK-NEXT:    scf.if %[[TWO]] {
// CHECK:           %[[SECOND:.*]] = lowbit.stage %[[BUFFERS]], %c1_i32{{.*}}
// CHECK-NEXT:      lowbit.copy_async %{{.*}}, %[[SECOND]]
// CHECK-NEXT:    }
// CHECK-NEXT:    lowbit.commit
// CHECK-NEXT:    lowbit.commit
// CHECK-NOT:     lowbit.wait

// Steady state of round i: it has arrived when one group is left under way, ...
// CHECK:         scf.for %[[I:.*]] = %c0_i32{{.*}} to %[[N]]
// CHECK-NEXT:      lowbit.wait {pending = 1}
// CHECK-NEXT:      lowbit.barrier {scope = "block"}
// ... then round i + 2 is started, into the stage that round i - 1 has left, if there is such a round, ...
// CHECK:           %[[MORE:.*]] = arith.cmpi slt
// CHECK-NEXT:      scf.if %[[MORE]] {
// CHECK:             %[[SLOT:.*]] = arith.remui %{{.*}}, %c3_i32{{.*}}
// CHECK:             %[[NEXT:.*]] = lowbit.stage %[[BUFFERS]], %[[SLOT]]
// CHECK-NEXT:        lowbit.copy_async %{{.*}}, %[[NEXT]]
// CHECK-NEXT:      }
// CHECK-NEXT:      lowbit.commit
// ... and round i is computed, with no second barrier.
// CHECK:           %[[MINE:.*]] = lowbit.stage %[[BUFFERS]], %{{.*}}
// CHECK-NEXT:      %[[TILE:.*]] = lowbit.load %[[MINE]]
// CHECK-NEXT:      lowbit.store %[[TILE]]
// CHECK-NOT:       lowbit.barrier
// CHECK:         lowbit.free_shared %[[BUFFERS]]
lowbit.program @three(%p: !llvm.ptr<1>, %n: i32) attributes {threads = 32, grid = [1, 1, 1], params = ["x", "n"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %x = lowbit.global_view %p : !llvm.ptr<1> -> !x
  %buffer = lowbit.alloc_shared : !buffer
  scf.for %i = %c0 to %n step %c1 : i32 {
    lowbit.pipeline attributes {num_stages = 3, scope = "block", warps = 1} {
      lowbit.copy_async %x[%i, %c0], %buffer {layout = "spatial(1, 32).local(1, 2)"} : !x, !buffer
    }
    %tile = lowbit.load %buffer[%c0, %c0] : !buffer -> !tile
    lowbit.store %tile, %x[%i, %c0] : !tile, !x
  }
  lowbit.free_shared %buffer : !buffer
  lowbit.return
}

// -----

// lowbit.grid_wait divides the copies: those before it (weights) start while the kernel before this one still runs,
// those after it (activations) do not. So the prologue starts all the weights, waits once, then starts the rest.
!x = !lowbit.global<[16, 64], f16, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[1, 64], f16, [64, 1], 0>

// There are five rounds, so that nothing has to be asked in front of the loop.
// CHECK-LABEL: lowbit.program
// CHECK-SAME:       (%{{.*}}: !llvm.ptr<1>, %{{.*}}: !llvm.ptr<1>)
// CHECK:         %[[W:.*]] = lowbit.global_view %
// CHECK:         %[[X:.*]] = lowbit.global_view %
// CHECK-NOT:     scf.if
// CHECK:         lowbit.copy_async %[[W]]
// CHECK-NOT:     scf.if
// CHECK:         lowbit.copy_async %[[W]]
// CHECK-NEXT:    lowbit.grid_wait
// CHECK:         lowbit.copy_async %[[X]]
// CHECK-NEXT:    lowbit.commit
// CHECK-NOT:     scf.if
// CHECK:         lowbit.copy_async %[[X]]
// CHECK-NEXT:    lowbit.commit
// CHECK:         scf.for
// CHECK-NOT:     lowbit.grid_wait
// CHECK:           lowbit.copy_async %[[W]]
// CHECK:           lowbit.copy_async %[[X]]
lowbit.program @overlap(%pw: !llvm.ptr<1>, %px: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1], params = ["w", "x"],
    workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %c5 = arith.constant 5 : i32
  %w = lowbit.global_view %pw : !llvm.ptr<1> -> !x
  %x = lowbit.global_view %px : !llvm.ptr<1> -> !x
  %w_buffer = lowbit.alloc_shared : !buffer
  %x_buffer = lowbit.alloc_shared : !buffer
  scf.for %i = %c0 to %c5 step %c1 : i32 {
    lowbit.pipeline attributes {num_stages = 3, scope = "block", warps = 1} {
      lowbit.copy_async %w[%i, %c0], %w_buffer {layout = "spatial(1, 32).local(1, 2)"} : !x, !buffer
      lowbit.grid_wait
      lowbit.copy_async %x[%i, %c0], %x_buffer {layout = "spatial(1, 32).local(1, 2)"} : !x, !buffer
    }
  }
  lowbit.return
}

// -----

// Two rounds and three stages: both rounds are copied in front of the loop, into two stages, and nothing in it.
!x = !lowbit.global<[16, 64], f16, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[1, 64], f16, [64, 1], 0>
// CHECK: !shared_2x1x64xf16 = !lowbit.shared<[2, 1, 64], f16, [64, 64, 1], 0>
// CHECK-LABEL: lowbit.program
// CHECK:         %[[BUFFERS:.*]] = lowbit.alloc_shared : !shared_2x1x64xf16
// CHECK:         lowbit.copy_async %
// CHECK:         lowbit.copy_async %
// CHECK-NEXT:    lowbit.commit
// CHECK-NEXT:    lowbit.commit
// CHECK:         scf.for
// CHECK-NEXT:      lowbit.wait {pending = 1}
// CHECK-NOT:     lowbit.copy_async
// CHECK:           lowbit.commit
// CHECK:         lowbit.return
lowbit.program @all_at_once(%p: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1], params = ["x"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %c2 = arith.constant 2 : i32
  %x = lowbit.global_view %p : !llvm.ptr<1> -> !x
  %buffer = lowbit.alloc_shared : !buffer
  scf.for %i = %c0 to %c2 step %c1 : i32 {
    lowbit.pipeline attributes {num_stages = 3, scope = "block", warps = 1} {
      lowbit.copy_async %x[%i, %c0], %buffer {layout = "spatial(1, 32).local(1, 2)"} : !x, !buffer
    }
  }
  lowbit.return
}

// -----

// The weights of one round at a time: the next is asked for when that before has arrived, and x after all of them.
!x = !lowbit.global<[16, 64], f16, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[1, 64], f16, [64, 1], 0>
// CHECK-LABEL: lowbit.program
// CHECK:         %[[W:.*]] = lowbit.global_view %
// CHECK:         %[[X:.*]] = lowbit.global_view %
// CHECK:         lowbit.copy_async %[[W]]
// CHECK-NEXT:    lowbit.commit
// CHECK-NEXT:    lowbit.wait {pending = 0}
// CHECK:         lowbit.copy_async %[[W]]
// CHECK-NEXT:    lowbit.commit
// CHECK-NEXT:    lowbit.grid_wait
// CHECK-NOT:     lowbit.wait
// CHECK:         scf.for
// CHECK-NEXT:      lowbit.wait {pending = 1}
// CHECK:         lowbit.return
lowbit.program @throttled(%pw: !llvm.ptr<1>, %px: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1], params = ["w", "x"],
    workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %c5 = arith.constant 5 : i32
  %w = lowbit.global_view %pw : !llvm.ptr<1> -> !x
  %x = lowbit.global_view %px : !llvm.ptr<1> -> !x
  %w_buffer = lowbit.alloc_shared : !buffer
  %x_buffer = lowbit.alloc_shared : !buffer
  scf.for %i = %c0 to %c5 step %c1 : i32 {
    lowbit.pipeline attributes {num_stages = 3, prefetch_limit = 1, scope = "block", warps = 1} {
      lowbit.copy_async %w[%i, %c0], %w_buffer {layout = "spatial(1, 32).local(1, 2)"} : !x, !buffer
      lowbit.grid_wait
      lowbit.copy_async %x[%i, %c0], %x_buffer {layout = "spatial(1, 32).local(1, 2)"} : !x, !buffer
    }
  }
  lowbit.return
}

// -----

// A table is filled once, in front of the loop: while the first copies are under way, before the wait.
!x = !lowbit.global<[16, 64], f16, [64, 1], [1, 1]>
!buffer = !lowbit.shared<[1, 64], f16, [64, 1], 0>
!table = !lowbit.shared<[256, 32], i32, [32, 1], 0>
// CHECK-LABEL: lowbit.program
// CHECK:         lowbit.copy_async %
// CHECK:         lowbit.copy_async %
// CHECK-NEXT:    lowbit.fill_table %
// CHECK-NEXT:    lowbit.grid_wait
// CHECK:         scf.for
// CHECK-NOT:     lowbit.fill_table
// CHECK:         lowbit.return
lowbit.program @filled(%pw: !llvm.ptr<1>) attributes {threads = 32, grid = [1, 1, 1], params = ["w"], workspace = 0} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %c5 = arith.constant 5 : i32
  %w = lowbit.global_view %pw : !llvm.ptr<1> -> !x
  %buffer = lowbit.alloc_shared : !buffer
  %table = lowbit.alloc_shared : !table
  scf.for %i = %c0 to %c5 step %c1 : i32 {
    lowbit.pipeline attributes {num_stages = 3, scope = "block", warps = 1} {
      lowbit.copy_async %w[%i, %c0], %buffer {layout = "spatial(1, 32).local(1, 2)"} : !x, !buffer
      lowbit.fill_table %table {format = #lowbit.format<"nf4", []>, element = "f16", exponent = 0} : !table
      lowbit.grid_wait
    }
  }
  lowbit.return
}
