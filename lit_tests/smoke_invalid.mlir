// RUN: %lowbit-opt %s --split-input-file --verify-diagnostics

func.func @types(%x: i32) -> i32 {  // expected-note {{prior use here}}
  // expected-error @+1 {{use of value '%x' expects different type than prior uses}}
  return %x : i64
}

// -----

func.func @results(%x: i32) -> i32 {
  return  // expected-error {{has 0 operands, but enclosing function (@results) returns 1}}
}
