"""The table of number types: one row says all that memory, tensor cores and torch need."""

import pytest

from lowbit.dialect.elements import ACTS, ELEMENTS, OPERANDS, Element
from lowbit.dialect.types import element_bits
from lowbit.passes.lowering.warpgroup import Instructions
from lowbit.pylib.torch_types import TORCH

ALL = [pytest.param(element, id=name) for name, element in ELEMENTS.items()]


@pytest.mark.parametrize("element", ALL)
def test_memory_has_the_same_size_in_the_ir_and_in_torch(element: Element) -> None:
    assert element_bits(element.mlir) == element.bits == 8 * TORCH[element.name].itemsize


@pytest.mark.parametrize("element", ALL)
def test_vectors_and_panels_are_whole(element: Element) -> None:
    assert element.per_vector * element.bytes == 16 and element.per_panel * element.bytes == 128
    assert element.per_panel % element.mma_k == 0


@pytest.mark.parametrize(
    "a, b, kind",
    [
        ("f16", "f16", "m64n8k16.f32.f16.f16"),
        ("bf16", "bf16", "m64n8k16.f32.bf16.bf16"),
        ("f32", "f32", "m64n8k8.f32.tf32.tf32"),
        ("f8E4M3FN", "f8E4M3FN", "m64n8k32.f32.e4m3.e4m3"),
        ("i8", "i8", "m64n8k32.s32.s8.s8"),
        ("ui8", "i8", "m64n8k32.s32.u8.s8"),
    ],
)
def test_the_shape_of_a_product_follows_from_its_elements(a: str, b: str, kind: str) -> None:
    """PTX ISA 9.7.15.5: the k of a wgmma, and its types, for the operands that it takes."""
    assert Instructions(None, 8, a, b, 0).multiply.startswith(f"wgmma.mma_async.sync.aligned.{kind} ")


def test_operands_have_types_of_their_own() -> None:
    """Numbers of 8 bits are bytes in memory; as operands they are told apart."""
    assert len(OPERANDS) == sum(bool(element.mma) for element in ELEMENTS.values())
    assert all(element_bits(name) == element.bits for name, element in OPERANDS.items())


def test_activations_are_numbers_that_tensor_cores_multiply() -> None:
    assert all(ELEMENTS[name].mma == name and ELEMENTS[name].sums == "f32" for name in ACTS)
