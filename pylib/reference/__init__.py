"""The result that a matmul must give, in float64, and a derived bound on how far a kernel may be off.

    x, codes, scales, zeros, bias = random_problem(spec, m=4, seed=0)
    y = mm(x, pack(spec, codes, scales, zeros, bias))
    assert agrees(y, matmul(spec, x, codes, ...), tolerance(spec, x, codes, ...)).all()

With `MatmulSpec.compute`, x is what it is quantized to (`multiplied`): the result is that of x8 times its scales.
Arguments are torch tensors or NumPy arrays in the form that `pylib.weights.packed.pack` takes them, already rounded
to the spec's types. n is that of `codes`, so a few rows of a large weight can be checked by themselves.
"""

from lowbit.pylib.reference.bounds import agrees, folded_weight, tolerance
from lowbit.pylib.reference.definition import dequantize, matmul, multiplied, of_slots
from lowbit.pylib.reference.inputs import random_inputs, random_problem, random_residual

__all__ = [
    "agrees",
    "dequantize",
    "folded_weight",
    "matmul",
    "multiplied",
    "of_slots",
    "random_inputs",
    "random_problem",
    "random_residual",
    "tolerance",
]
