// RUN: %lowbit-opt %s --split-input-file --lower-to-llvm --verify-diagnostics

// Our own operations are gone by now.
gpu.module @m {
  gpu.func @k(%w: i32) kernel {
    // expected-error @below {{lower-to-llvm: lowbit.decode_pair is left over; run lower-tiles and lower-dequant before}}
    %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u4", []>, register = 1, exponent = 0,
      operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
    gpu.return
  }
}

// -----

// What upstream's passes cannot convert, they report.
gpu.module @m {
  gpu.func @k(%x: f32) kernel {
    // expected-error @below {{failed to legalize operation 'gpu.all_reduce'}}
    %0 = gpu.all_reduce add %x {} : (f32) -> (f32)
    gpu.return
  }
}
