"""What scales multiply where one result serves every number of tokens. No MLIR is needed."""

from __future__ import annotations

from lowbit.dialect.formats.recipes import compute_element, exponent
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.requirements import has_scales_of_x


def scales_weights(spec: MatmulSpec) -> bool:
    """Tells whether all kernels of an invariant matmul scale weights, in place of products.

    One instruction scales and adds what zeros and offsets take; kernels for many tokens have nothing to do between two
    products of a chain then, and no sums of x. Without zeros codes are multiplied as they are stored, which is faster
    for few tokens. Codes must be numbers of x's type. Scales must be, too, so that weights are rounded as `dequantize`
    rounds them; those of a second level with offsets are rounded to x's type first, as the offsets are.
    """
    if not spec.invariant or spec.zeros == "none" or spec.group_size is None:
        return False
    if spec.compute or spec.outliers or spec.experts > 1:
        return False
    element = compute_element(spec.dtype, spec.act)
    alike = spec.zeros == "offset" if spec.bilevel else has_scales_of_x(spec)
    return alike and element == spec.act and exponent(spec.dtype, element) == 0


def scales_products(spec: MatmulSpec) -> bool:
    """Tells whether kernels of an invariant matmul scale the products of groups, added up from zero."""
    return spec.group_size is not None and not scales_weights(spec)
