"""Import this to run saved graphs: it registers `torch.ops.lowbit.matmul`, which compiles what a graph asks for."""

from lowbit.pylib.matmul import run_described

__all__ = ["run_described"]
