"""How the IR is lowered, from a matmul on tensors to PTX or host code: passes, kernels, schedules, code generation."""

from lowbit.aliases import alias

alias(__name__)
