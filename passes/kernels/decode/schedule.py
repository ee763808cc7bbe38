"""What a kernel's free choices are: `Schedule`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from lowbit.dialect.errors import SpecError
from lowbit.passes.kernels.base import KernelSchedule, check_type

TOKEN_TILES = (1, 8, 16, 32, 64, 128, 256)  # most tokens of a launch that have a kernel of their own
ROTATED = (8, 16)  # tokens whose blocks begin at different columns; with fewer, x is little; more gained nothing
REFILL_AFTER_MMA = 128  # tokens from which on a round has too many copies for its first product to wait for them


Refill = Literal["before_mma", "after_first_mma", "per_warp"]


def usual_refill(tokens: int, warps_n: int) -> Refill:
    """`Schedule.refill` of a loop with wgmma where nobody has measured: the more warps share x, and the wider it is,
    the longer they wait for one another."""
    if (warps_n >= 16 and tokens >= 64) or (warps_n >= 8 and tokens >= 256):
        return "per_warp"
    return "after_first_mma" if tokens >= REFILL_AFTER_MMA else "before_mma"


@dataclass(frozen=True)
class Schedule(KernelSchedule):
    """The free choices of the decode kernel. Every choice gives the same numbers up to f32 rounding.

    A block computes 16 * row_blocks * warps_n rows of the weight for `tokens` tokens. Its warps_n * warps_k warps
    share the rows and, within every step of step_k * warps_k columns, k. `split_k` blocks share a row's k.

    tokens             the most tokens of one launch: one of TOKEN_TILES
    row_blocks         blocks of 16 rows per warp
    warps_n, warps_k   warps of a block along n and along k
    step_k             columns that a warp takes per step: whole chunks of the packed weight
    num_stages         depth of the copy pipeline; with more stages than rounds, all copies are started in front
    split_k            blocks that share k and add up their sums
    cluster            of these, blocks that add up through distributed shared memory: 1 or all (sm_90)
    wgmma              use wgmma, which multiplies with four warps and reads x from shared memory (sm_90a)
    max_blocks_per_sm  at most so many blocks on a multiprocessor at a time; 0: as many as fit. With spread_k or
                       outliers_by_step exactly so many, if shared memory has room: a thread takes no more registers
                       than that leaves
    preload_weights    load a block's part of the weight to registers, and x to shared memory, before the first product
    min_blocks         fill the grid up to so many blocks with empty ones
    prefetch_limit     rounds of the weight under way until the kernel before has ended; 0: as many as there are stages
    raw_codes          skip the subtraction for signed codes and zero points as well; sums of x correct the result. With
                       spread_k that is always so
    refill             when a round starts the copies of a later one: before its products, after its first product has
                       begun (wgmma), or as each warp gets there, without a barrier per round (wgmma)
    overlap_groups     begin the product of a group before that of the last group has ended (wgmma)
    spread_k           give the eight columns of a product to eight blocks of 16 columns of k (one token), so that each
                       lane scales the sums of groups of its own
    outliers_by_step   multiply outliers in the step that has their x in shared memory, and not after the loop with x
                       from device memory (wgmma)
    chains             parts of a step with sums of their own (invariant matmuls): a warp adds up as so many warps with
                       steps of step_k / chains columns do
    """

    integer_mma: ClassVar[bool] = False
    """Whether products are integers: of an `IntegerSchedule`."""
    token_tiles: ClassVar[tuple[int, ...]] = TOKEN_TILES
    """The values of `tokens`."""

    tokens: int = 8
    row_blocks: int = 2
    warps_n: int = 1
    warps_k: int = 8
    step_k: int = 128
    num_stages: int = 3
    split_k: int = 1
    cluster: int = 1
    wgmma: bool = False
    max_blocks_per_sm: int = 0
    preload_weights: bool = False
    min_blocks: int = 0
    prefetch_limit: int = 0
    raw_codes: bool = False
    refill: Refill = "before_mma"
    overlap_groups: bool = False
    spread_k: bool = False
    outliers_by_step: bool = False
    chains: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refill not in get_args(Refill):
            raise SpecError(f"schedule: refill={self.refill!r} must be one of {', '.join(map(repr, get_args(Refill)))}")
        self._check_sizes()
        for given, rule, holds in _RULES:
            if not holds(self):
                raise SpecError(f"schedule: {given} {rule}".format(s=self))

    def _check_sizes(self) -> None:
        """The ranges of single fields."""
        if self.tokens not in self.token_tiles:
            raise SpecError(f"schedule: tokens={self.tokens} must be one of {', '.join(map(str, self.token_tiles))}")
        for name, allowed in _RANGES.items():
            if getattr(self, name) not in allowed:
                rule = f"in {allowed[0]}..{allowed[-1]}{', 0: no limit' * (0 in allowed)}"
                steps = f" and a multiple of {allowed.step}" if allowed.step > 1 else ""
                raise SpecError(f"schedule: {name}={getattr(self, name)} must be {rule}{steps}")
        if self.threads > 1024:
            raise SpecError(f"schedule: warps_n*warps_k={self.threads // 32} must be at most 32 warps")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_n * self.warps_k

    @property
    def mma_columns(self) -> int:
        """Columns of the products: an mma has eight, of which a single token uses one (its limbs four)."""
        return max(8, self.tokens)

    @property
    def columns(self) -> int:
        """Columns of the sums that a block ends with; limbs and blocks of k leave one for their token."""
        return 1 if self.integer_mma or self.spread_k else self.mma_columns

    @property
    def rows(self) -> int:
        """Rows of the weight per block."""
        return 16 * self.row_blocks * self.warps_n

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Schedule:
        """The inverse of `dataclasses.asdict`. Fields may have the names and numbers of version 0.1, as in old tables
        and tuning logs, where a flag told integer schedules apart. Raises SpecError for an unknown field or a value
        that does not fit."""
        read = dict(_modern(name, value) for name, value in values.items())
        in_integers = read.pop("integer_mma", False)
        check_type("integer_mma", in_integers, False)
        kind = IntegerSchedule if in_integers else cls
        known = [field.name for field in fields(kind)]
        if unknown := sorted(read.keys() - set(known)):
            raise SpecError(f"schedule: unknown field {unknown[0]!r}; allowed: {', '.join(known)}")
        return kind(**read)


@dataclass(frozen=True)
class IntegerSchedule(Schedule):
    """The free choices of the decode kernel in integers, which multiplies codes as bytes with one token split into
    8-bit limbs (`dialect.formats.integer_limbs`): those of `Schedule` that floating point is not needed for."""

    integer_mma: ClassVar[bool] = True

    tokens: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed = {"tokens": 1, "warps_n": 1}
        fixed |= dict.fromkeys(("wgmma", "preload_weights", "raw_codes", "spread_k"), False) | {"chains": 1}
        for name, value in fixed.items():
            if getattr(self, name) != value:
                raise SpecError(f"schedule: decode_integer needs {name}={value}; got {name}={getattr(self, name)}")


MOST_BLOCKS_PER_SM = 32  # of any GPU
# Fields by themselves: more would take no GPU further, but a compiler hours.
_RANGES = {
    "row_blocks": range(1, 65),
    "warps_n": range(1, 33),
    "warps_k": range(1, 33),
    "step_k": range(16, 4097, 16),
    "num_stages": range(1, 65),
    "split_k": range(1, 1025),
    "cluster": range(1, 1025),
    "max_blocks_per_sm": range(MOST_BLOCKS_PER_SM + 1),
    "min_blocks": range(65536),
    "prefetch_limit": range(65),
    "chains": range(1, 17),
}

# Fields that depend on others: what was given, what it needs (`s` is the schedule), and whether it has that.
_RULES: tuple[tuple[str, str, Callable[[Schedule], bool]], ...] = (
    (
        "cluster={s.cluster}",
        "must be 1, or split_k={s.split_k} where that is at most 8 and divides the {s.rows} rows of a block",
        lambda s: s.cluster in (1, s.split_k) and s.cluster <= 8 and s.rows % s.cluster == 0,
    ),
    (
        "wgmma=True",
        "needs warps_n={s.warps_n} to be a multiple of 4 and tokens={s.tokens} to be at least 8",
        lambda s: not s.wgmma or (s.warps_n % 4 == 0 and s.tokens >= 8),
    ),
    (
        "tokens={s.tokens}",
        "needs wgmma=True; without it the sums of at most 64 tokens fit into registers",
        lambda s: s.tokens <= 64 or s.wgmma,
    ),
    (
        "preload_weights=True",
        "needs num_stages={s.num_stages} to be 1 and prefetch_limit={s.prefetch_limit} to be 0",
        lambda s: not s.preload_weights or (s.num_stages, s.prefetch_limit) == (1, 0),
    ),
    (
        "overlap_groups=True",
        "needs wgmma=True and row_blocks=1; got wgmma={s.wgmma}, row_blocks={s.row_blocks}",
        lambda s: not s.overlap_groups or (s.wgmma and s.row_blocks == 1),
    ),
    (
        "spread_k=True",
        "needs tokens={s.tokens} to be 1 and step_k={s.step_k} to be a multiple of 128",
        lambda s: not s.spread_k or (s.tokens == 1 and s.step_k % 128 == 0),
    ),
    (
        "chains={s.chains}",
        "must cut step_k={s.step_k} into multiples of 16 columns",
        lambda s: s.step_k % (16 * s.chains) == 0,
    ),
    (
        "refill={s.refill!r}",
        "needs wgmma=True and preload_weights=False; got wgmma={s.wgmma}, preload_weights={s.preload_weights}",
        lambda s: s.refill == "before_mma" or (s.wgmma and not s.preload_weights),
    ),
    (
        "refill='per_warp'",
        "needs num_stages={s.num_stages} to be at least 2 and prefetch_limit={s.prefetch_limit} to be 0",
        lambda s: s.refill != "per_warp" or (s.num_stages >= 2 and s.prefetch_limit == 0),
    ),
    (
        "outliers_by_step=True",
        "needs wgmma=True, preload_weights=False, another refill; got {s.wgmma}, {s.preload_weights}, {s.refill!r}",
        lambda s: not s.outliers_by_step or (s.wgmma and not s.preload_weights and s.refill != "per_warp"),
    ),
)

# Fields of version 0.1, whose choices were all integers.
_RENAMED = {
    "stages": "num_stages",
    "splits": "split_k",
    "max_blocks": "max_blocks_per_sm",
    "digits": "integer_mma",
    "resident": "preload_weights",
    "least_blocks": "min_blocks",
    "throttle": "prefetch_limit",
    "bare": "raw_codes",
    "late": "refill",
    "overlap": "overlap_groups",
}
_CHOICES = ("wgmma", "integer_mma", "preload_weights", "raw_codes", "overlap_groups", "spread_k", "outliers_by_step")


def _modern(name: str, value: Any) -> tuple[str, Any]:
    """A field as it is called now, and its value as it is written now."""
    name = _RENAMED.get(name, name)
    if type(value) is int and name in _CHOICES and value in (0, 1):
        value = bool(value)
    if type(value) is int and name == "refill" and 0 <= value < len(get_args(Refill)):
        value = get_args(Refill)[value]
    return name, value
