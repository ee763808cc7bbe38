"""Import this to run saved graphs: it registers `torch.ops.lowbit.matmul`, which compiles what a graph asks for."""

import lowbit.pylib.matmul  # noqa: F401  (registers the operators)
