// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

// What is wrong with an operation in our form is said at its place; verifiers say the rest.

func.func @name() {
  // expected-error @below {{there is no operation lowbit.barier; did you mean lowbit.barrier?}}
  lowbit.barier {scope = "warps"}
  return
}

// -----

!tile = !lowbit.reg<[32, 1], f32, "spatial(32, 1)">
func.func @operands(%a: !tile) {
  // expected-error @below {{lowbit.add: expected operands a, b; 1 are there, got ':'}}
  %b = lowbit.add %a : !tile
  return
}

// -----

!tile = !lowbit.reg<[32, 1], f32, "spatial(32, 1)">
func.func @types(%a: !tile) {
  // expected-error @below {{lowbit.fma: expected the types of a, b, c -> result, got !tile, !tile -> !tile}}
  %b = lowbit.fma %a, %a, %a : !tile, !tile -> !tile
  return
}

// -----

!tile = !lowbit.reg<[32, 1], f32, "spatial(32, 1)">
func.func @no_types(%a: !tile) {
  %b = lowbit.add %a, %a
  // expected-error @below {{lowbit.add: expected ':' and types, got 'return'}}
  return
}

// -----

// A line break within an operation moves nothing that comes later.
!tile = !lowbit.reg<[32, 1], f32, "spatial(32, 1)">
func.func @lines(%a: !tile) {
  %b = lowbit.add
    %a, %a
    : !tile
  // expected-error @below {{kind: expected one of float, signed, unsigned}}
  %c = lowbit.cast %b {kind = "none"} : !tile
  return
}

// -----

// expected-error @below {{lowbit.pipeline: expected a region in braces, got '}'}}
func.func @region() { lowbit.pipeline attributes {num_stages = 2, scope = "block"} }
