"""`torch.ops.lowbit`: the operators that torch sees of a matmul. `lowbit.pylib.torch_op` registers them."""
