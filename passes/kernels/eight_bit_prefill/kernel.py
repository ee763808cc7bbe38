"""The prefill kernel for activations of 8 bits: `passes.kernels.persistent.kernel` with another compute side.

The idea. Codes become bytes, less their zeros, and are multiplied by x of 8 bits, which has been written in the order
of columns that this gives (`dialect.formats.byte_codes`). What a product is scaled by differs from group to group, so
products of a group are added to sums in f32 in other registers; f8e4m3, of whose products tensor cores keep 13 to 14
bits of a sum, is added after 128 columns even where rows have one scale. Integers with one scale per row need none of
this: the tensor core adds them up.

    for panel of `panel_k` columns:
        a = bytes of the panel's codes, less zeros
        load codes and scales of later panels, if the tensor core adds up all columns
        wait until x is there
        for group in panel, part of the tile's tokens:
            product = a x^T                           begun in the registers that are free
            wait until the product before has ended
            sums = sums + scale * that product        beside this one, if there are two sets of registers
        load codes and scales of later panels otherwise
    at the end of a tile: times the scale of the token, add the bias, convert, store

In an order of sums (`passes.kernels.eight_bit_in_order`) k is visited chain by chain. f8e4m3 is then multiplied by
codes as they are stored, and sums of x make up for zeros and signs (`eight_bit_prefill.sums_of_x`). So is i8 where
codes of 8 bits have zeros; others are less their zeros as ever, since products of integers are exact.

A tile of T tokens takes T / 2 registers of a thread for its sums, and T / 2 / parts for each set for products. So there
are none for codes of later panels: they wait in shared memory, a few panels ahead (`eight_bit_prefill.codes`). Blocks
that split k need that room for sums, and have codes of the next panel in registers. Scales and zeros of later panels
go to registers, too. Where products have no registers of their own, all of these are loaded before a panel's products
begin, and otherwise while the last one of a panel is under way.
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_prefill.byte_weight import ByteWeight
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.eight_bit_prefill.registers import with_numbers_ahead
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.eight_bit_prefill.wgmma import ByteWgmmaMultiplier
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.kernel import Kernel, Parts
from lowbit.passes.kernels.persistent.panels import BoxPanels
from lowbit.passes.kernels.persistent.stores import StagedStore


def eight_bit_prefill_matmul(spec: MatmulSpec, schedule: EightBitPrefillSchedule) -> ir.Module:
    """The tile program of a matmul of activations of 8 bits, in a module of its own."""
    plan, banks = with_numbers_ahead(bytes_plan(spec, schedule, WGMMA)), schedule.banks
    parts = Parts(
        panels=BoxPanels,
        store=StagedStore,
        weight=lambda p: ByteWeight(p, plan.in_f16 if spec.folds else plan),
        multiplier=lambda p, panels, weight: ByteWgmmaMultiplier(p, plan, banks, panels, weight),
    )
    return Kernel(plan.base, parts).build()
