"""Hopper with its own instructions: H100 and H200. What is measured, is measured on an H200 (2026-11)."""

from __future__ import annotations

from dataclasses import replace

from lowbit.passes.costs import Costs, DecodeCosts, EightBitPrefillCosts, EngineCosts, PrefillCosts, Rates, Thresholds
from lowbit.passes.target import gpu

# Fitted to what choosing with them loses: docs/tuning.md says to which timings, and how good the choices are.
_MMA = EngineCosts(
    memory=4.7e6,
    l2=4.8e6,
    x=0.0,
    in_flight=12e3,
    warps=5.6,
    round=0.047,
    block=0.34,
    split=3.2,
    cluster=1.62,
    tensor=1.15,
    crowding=0.39,
    barrier=1.5,
    per_warp=1.0,
    idle=0.61,
    tail=0.16,
    scale=0.54,
    decode=(2.3, 2.6, 4.3, 4.55, 4.65, 5.6, 5.6, 5.4),
    decode_raw=0.8,
    decode_float=1.0,
    decode_table=5.0,
    e4m3=2.5,  # mma.sync becomes conversions and products of f16: instructions counted, not fitted
)
_WGMMA = EngineCosts(
    memory=5.4e6,
    l2=11.5e6,
    x=0.142,
    in_flight=21.6e3,
    warps=3.06,
    round=0.129,
    block=1.64,
    split=12.7,
    cluster=1.3,
    tensor=0.39,
    crowding=0.4,
    barrier=1.436,
    per_warp=0.927,
    idle=0.681,
    tail=0.512,
    scale=1.29,
    decode=(2.4, 1.94, 2.27, 2.53, 2.8, 2.61, 2.4, 3.68),
    decode_raw=0.821,
    decode_float=1.5,
    decode_table=4.58,
)
_DECODE = DecodeCosts(
    mma=_MMA,
    wgmma=_WGMMA,
    integer=replace(_MMA, tensor=_MMA.tensor / 2, decode=(0.69,) * 8),  # half the instructions
    clock=1800.0,
    reach=0.9,
    wide=0.92,  # fitted to tiles of 128 and 256,
    wide_bytes=1.17,  # and this one to tiles of 128
    scaled=2.5,
    scaled_warps=18.0,
    lone=1.18,
    spread_start=1.2,
    preloaded=0.7,
    split_limbs=7.4,
    outlier=0.28,  # 8192 x 8192: some 6, 12, 25 and 62 us more for 8, 16, 32 and 64 tokens
)
# Fitted to 557 timings (u4 in groups of 128, 15 sizes, 100 to 4096 tokens), rested: nine of ten are right within 5 %.
_PREFILL = PrefillCosts(
    launch=1.0,
    late=2.5,
    per_token=0.00218,
    per_columns=0.057,
    per_panel=0.25,
    decoding={"uint": 0.1, "int": 0.1, "float": 0.14, "table": 0.14},
    shown=0.2,
    end_per_token=0.0026,
    multicast=0.974,
    idle=0.2,
    exchange=2.0,
    sent=100e3,
    meeting=3.0,
    read=80e3,
    uneven=0.5,
    deep=0.94,
    shared_x=0.985,
    narrow=128,
    reaches={4: 0.9},
    margin=1.02,
    wide_margin=1.05,
    wide_tokens=160,
    memory=4.5e6,
)
# Fitted to 159 timings (f8e4m3, u4 in groups of 128 and f8e4m3 per row, 14 sizes, 128 to 4096 tokens), rested. Nine of
# ten of tiles of 256 tokens are right within 5 %, and of smaller ones, which were timed when codes of all kernels went
# straight to registers, within 10 %.
_EIGHT_BIT_PREFILL = EightBitPrefillCosts(
    launch=1.9,
    per_token=0.00214,
    per_sum=0.00067,
    per_panel=0.112,
    decoding=0.146,
    folding=0.134,
    table=0.051,
    wide=0.027,
    zeros=0.1,
    shown=0.62,
    end_per_token=0.0065,
    multicast=0.973,
    narrow=128,
    exchange=1.0,
    memory=4.5e6,
)
H200 = Costs(_DECODE, _PREFILL, _EIGHT_BIT_PREFILL, bandwidth=4.8e6, products=5e8)
HOPPER = Rates(mma=1270, vendor=2048, clock=1755, memory=3.35e6, cache=50e6)  # mma.sync has 62 % of wgmma's rate

TARGET = gpu(
    "sm_90a",
    ptx=86,
    shared_kb=228,
    threads=2048,
    blocks=32,
    multiprocessors=132,
    clusters=True,
    wgmma=True,
    hardware="NVIDIA H200",
    most_multiprocessors=144,  # of a whole GH100
    rates=HOPPER,
    costs=H200,
    thresholds=Thresholds(vendor={(True, True): 1536, (True, False): 3072, (False, True): 6144}),
)
