"""What kernels take on a GPU, in numbers: what choices of schedules are predicted with. Each file of
`passes/targets/` has those of its architecture, or takes those of another that was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineCosts:
    """Constants of decode kernels with one kind of tensor core instruction, in bytes per microsecond, microseconds and
    clocks.

    memory, l2    bytes per microsecond of the device memory and of the L2 cache
    x             the part of the time that reading x takes, which up to 32 tokens the weight has to wait
    in_flight     bytes of the weight that must be on their way to a multiprocessor for its share of the memory
    warps         warps on a multiprocessor that hide the latency of arithmetic
    round, block  microseconds of a round, and to start and end a block
    split         microseconds until all splits are there, through device memory
    cluster       the same within a cluster of two; twice for four, three times for eight
    tensor        the part of two clocks that 16 x 16 weights and 8 tokens take
    crowding      the part of the time that is lost where as many blocks again fit as are needed
    barrier       times as long where warps share x and wait for one another
    per_warp      times that, where every warp refills its stages by itself
    idle          the part of the time that the last blocks leave multiprocessors idle; the next kernel uses the rest
    tail          the part of the time that they leave room beside them on a multiprocessor
    scale         the part of what scaling the sums of a group, or of a step of it, takes
    decode        clocks of a multiprocessor for 256 codes of 1 to 8 bits
    decode_raw    times as many, where codes are multiplied as they are stored
    decode_float  times as many for floats
    decode_table  clocks for tables, whatever the bits
    e4m3          clocks more for 256 codes that are multiplied as f8e4m3, where tensor cores get them as f16
    """

    memory: float
    l2: float
    x: float
    in_flight: float
    warps: float
    round: float
    block: float
    split: float
    cluster: float
    tensor: float
    crowding: float
    barrier: float
    per_warp: float
    idle: float
    tail: float
    scale: float
    decode: tuple[float, ...]
    decode_raw: float
    decode_float: float
    decode_table: float
    e4m3: float = 0.0


@dataclass(frozen=True)
class DecodeCosts:
    """Constants of the decode family, and of the others for few tokens.

    mma, wgmma, integer  by engine
    clock          clocks of a multiprocessor per microsecond
    reach          the part of the multiprocessors that take part in clusters of four and eight, each within a GPC
    wide           times as long, for more than 64 tokens without clusters of four
    wide_bytes     the same for activations of 8 bits
    scaled         clocks to decode 256 weights that factors of a step scale, and to scale them
    scaled_warps   warps on a multiprocessor that hide their latency
    lone           times as long where blocks start and end alone on a multiprocessor, wave after wave (`spread_k`)
    spread_start   microseconds more until blocks with `spread_k` have begun, as x is laid out over columns
    preloaded      times as long as the model expects with preloaded weights and two tokens or more: kernels that run
                   side by side hide each other's ends
    split_limbs    clocks for 256 codes, divided by the row blocks that share the digits of x
    outlier        clocks of a multiprocessor for the product of an outlier and a token
    """

    mma: EngineCosts
    wgmma: EngineCosts
    integer: EngineCosts
    clock: float
    reach: float
    wide: float
    wide_bytes: float
    scaled: float
    scaled_warps: float
    lone: float
    spread_start: float
    preloaded: float
    split_limbs: float
    outlier: float


@dataclass(frozen=True)
class PrefillCosts:
    """Constants of the prefill family with wgmma, in microseconds unless said.

    launch        of a launch that the one before does not hide
    late          until blocks start that find room only when others have ended
    per_token     of products: of a token of a tile and 64 columns
    per_columns   of products: of 64 columns whatever the tokens
    per_panel     of decoding: of a panel
    decoding      of decoding: of 64 columns, by the kind of elements
    shown         the part of the shorter of products and decoding that is not hidden behind the longer
    end_per_token of the end of a tile
    multicast     times as long, where blocks of a cluster share x and are in the middle of their work
    idle          the part less of their time in a single wave, if all other multiprocessors were idle
    exchange      where blocks split k: until sums are there
    sent          bytes of these per microsecond
    meeting       where blocks share rounds: until the last one of a tile knows that it is
    read          bytes per microsecond that this block reads
    uneven        more where parts of tiles do not begin together
    deep          times as long are rounds then, where eight panels have room
    shared_x      times as long, where blocks share x of `narrow` tokens or more
    reaches       the part of the multiprocessors that take part in clusters of so many blocks; others: all
    margin        times as long, where tiles are cut or shared: gains and predicted ones differ by as much
    wide_margin   the same where tiles of more than `wide_tokens` are shared
    memory        bytes of the weight per microsecond
    """

    launch: float
    late: float
    per_token: float
    per_columns: float
    per_panel: float
    decoding: Mapping[str, float]
    shown: float
    end_per_token: float
    multicast: float
    idle: float
    exchange: float
    sent: float
    meeting: float
    read: float
    uneven: float
    deep: float
    shared_x: float
    narrow: int
    reaches: Mapping[int, float]
    margin: float
    wide_margin: float
    wide_tokens: int
    memory: float


@dataclass(frozen=True)
class EightBitPrefillCosts:
    """Constants of the prefill family with wgmma for activations of 8 bits, in microseconds unless said.

    launch, end_per_token, exchange, memory, shown, multicast  as in `PrefillCosts`
    per_token       of products: of a token of a tile and 128 columns
    per_sum         of a token and product that is added to sums in f32
    per_panel       of decoding: of a panel
    decoding        of decoding: of 128 columns
    folding, table, wide  more if scales are folded in, of tables, and of codes of 8 bits
    zeros           more where zeros, or offsets of signed codes, are subtracted from codes
    narrow          tokens up to which sharing x gains nothing
    """

    launch: float
    per_token: float
    per_sum: float
    per_panel: float
    decoding: float
    folding: float
    table: float
    wide: float
    zeros: float
    shown: float
    end_per_token: float
    multicast: float
    narrow: int
    exchange: float
    memory: float


@dataclass(frozen=True)
class Rates:
    """Rates of the usual GPU of an architecture, at its boost clock.

    mma      multiply-adds of f16 with sums in f32 per clock and multiprocessor, by mma.sync
    vendor   the same by the instructions that the vendor's library uses
    clock    clocks per microsecond
    memory   bytes per microsecond
    cache    bytes of the L2 cache
    """

    mma: float
    vendor: float
    clock: float
    memory: float
    cache: float


@dataclass(frozen=True)
class Costs:
    """All of these, of the GPU on which they were measured.

    bandwidth  bytes of a weight per microsecond that no kernel exceeds
    products   multiplications of 16 bits per microsecond that no kernel exceeds
    """

    decode: DecodeCosts
    prefill: PrefillCosts
    eight_bit_prefill: EightBitPrefillCosts
    bandwidth: float
    products: float


@dataclass(frozen=True)
class Thresholds:
    """Where one way to multiply takes over from another, measured (docs/tuning.md).

    decoded    tokens up to which kernels of the decode families are the faster ones, mostly
    few        tokens up to which they are, though others are predicted to be for 80 to 120 tokens
    sharing    tokens up to which prefill kernels gain from blocks that share rounds
    launched   rows beyond which writing the weight out is faster than another launch for few tokens
    vendor     the last token tile beyond which the vendor's matmul on the weight written out is faster, by whether a
               weight has outliers, and a second level; no entry: never
    """

    decoded: int = 128
    few: int = 64
    sharing: int = 512
    launched: int = 192
    vendor: Mapping[tuple[bool, bool], int] | None = None


THRESHOLDS = Thresholds()
"""Those of targets on which none were measured: an H200's, without the vendor's matmul."""
