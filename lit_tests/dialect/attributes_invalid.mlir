// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What verifiers refuse: attributes. Wrong types are in types_invalid.mlir.

// Attributes that no operation declares, ...
func.func @unknown_attribute() {
  // expected-error @below {{'lowbit.barrier' op attributes: expected none but async_proxy, relaxed, scope, warps, got wraps}}
  "lowbit.barrier"() {scope = "block", warps = 1, wraps = 2} : () -> ()
  return
}

// -----

func.func @unknown_attribute_of_none() {
  // expected-error @below {{'lowbit.commit' op attributes: expected none, got lowbit.group}}
  "lowbit.commit"() {lowbit.group = 2} : () -> ()
  return
}

// -----

// ... are of another kind than declared, ...
func.func @flag() {
  // expected-error @below {{async_proxy: expected a unit attribute, got true}}
  "lowbit.barrier"() {scope = "block", warps = 1, async_proxy = true} : () -> ()
  return
}

// -----

func.func @choice(%w: i32) {
  // expected-error @below {{offset: expected one of "subtracted", "deferred", "raw", got "late"}}
  %0 = "lowbit.decode_pair"(%w) {format = #lowbit.format<"u4", []>, register = 0, exponent = 0, offset = "late",
    operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return
}

// -----

// ... or are missing. Another dialect's may be there.
func.func @missing_attribute() {
  "lowbit.commit"() {nvvm.note = 2} : () -> ()
  // expected-error @below {{attribute "warps" is expected but not provided}}
  "lowbit.barrier"() {scope = "block"} : () -> ()
  return
}
