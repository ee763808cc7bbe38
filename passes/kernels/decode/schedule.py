"""What a kernel's free choices are (`Schedule`) and what a launch needs to know (`Launch`)."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.errors import SpecError

TOKEN_TILES = (1, 8, 16, 32, 64, 128, 256)  # the m for which a kernel of its own is made, up to the next


@dataclass(frozen=True)
class Schedule:
    """The free choices of the skinny matmul kernel; every choice gives the same numbers up to f32 rounding.

    A block computes 16 * row_blocks * warps_n rows of the weight for `tokens` tokens. Its warps_n * warps_k warps
    split the rows and, within every step of step_k * warps_k columns, k. `splits` blocks share a row's k.
    """

    tokens: int = 8  # at most: one of TOKEN_TILES
    row_blocks: int = 2  # of 16 rows, per warp
    warps_n: int = 1
    warps_k: int = 8
    step_k: int = 128  # columns a warp takes per step: whole chunks
    stages: int = 3  # of the copy pipeline; with more than there are rounds, everything is copied at the start
    splits: int = 1
    cluster: int = 1  # of these splits, those that add up through distributed shared memory: 1 or all (sm_90)
    wgmma: int = 0  # 1: instructions of whole warpgroups, which read x from shared memory (sm_90a)
    max_blocks: int = 0  # on a multiprocessor at a time; 0: as many as fit
    digits: int = 0  # 1: one token as digits times codes as bytes, in integers (`dialect.formats.integer_limbs`)
    resident: int = 0  # 1: a block's part of the weight in registers, x in shared memory, each all at once
    least_blocks: int = 0  # of the grid: empty ones fill it up
    throttle: int = 0  # rounds of the weight under way at a time until the kernel before has ended; 0: as many as fit
    bare: int = 0  # 1: signed codes and such with zeros, too, are multiplied as stored; sums of x make up for that
    late: int = 0  # 1: with wgmma, a round's first product comes before its copies; 2: and warps may drift apart
    overlap: int = 0  # 1: the product of a group is begun, with wgmma, before that of the last has ended

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int:
                raise SpecError(f"schedule: {name}={value!r} must be an integer")
        if self.tokens not in TOKEN_TILES:
            raise SpecError(f"schedule: tokens={self.tokens} must be one of {', '.join(map(str, TOKEN_TILES))}")
        for name in ("row_blocks", "warps_n", "warps_k", "stages", "splits", "cluster"):
            if getattr(self, name) < 1:
                raise SpecError(f"schedule: {name}={getattr(self, name)} must be at least 1")
        if self.cluster not in (1, self.splits) or self.cluster > 8 or self.rows % self.cluster:
            raise SpecError(
                f"schedule: cluster={self.cluster} must be 1, or splits={self.splits} where that is at most 8 and "
                f"divides the {self.rows} rows of a block"
            )
        if self.wgmma not in (0, 1) or (self.wgmma and (self.warps_n % 4 or self.tokens < 8)):
            raise SpecError(
                f"schedule: wgmma={self.wgmma} must be 0, or 1 with warps_n={self.warps_n} a multiple of 4 and "
                f"tokens={self.tokens} at least 8"
            )
        if self.tokens > 64 and not self.wgmma:
            raise SpecError(f"schedule: tokens={self.tokens} needs wgmma=1; without it at most 64 fit into registers")
        if self.digits not in (0, 1) or (self.digits and (self.tokens, self.warps_n, self.wgmma) != (1, 1, 0)):
            raise SpecError(
                f"schedule: digits={self.digits} must be 0, or 1 with tokens=1, warps_n=1 and wgmma=0, not "
                f"tokens={self.tokens}, warps_n={self.warps_n} and wgmma={self.wgmma}"
            )
        if self.resident not in (0, 1) or (self.resident and (self.digits or self.stages != 1)):
            raise SpecError(
                f"schedule: resident={self.resident} must be 0, or 1 with stages=1 and digits=0, not "
                f"stages={self.stages} and digits={self.digits}"
            )
        if self.overlap not in (0, 1) or (self.overlap and (not self.wgmma or self.row_blocks > 1)):
            raise SpecError(
                f"schedule: overlap={self.overlap} must be 0, or 1 with wgmma=1 and row_blocks=1, not "
                f"wgmma={self.wgmma} and row_blocks={self.row_blocks}"
            )
        if self.late not in (0, 1, 2) or (self.late and (not self.wgmma or self.resident)):
            raise SpecError(
                f"schedule: late={self.late} must be 0, or 1 or 2 with wgmma=1 and resident=0, not "
                f"wgmma={self.wgmma} and resident={self.resident}"
            )
        if self.late == 2 and (self.stages < 2 or self.throttle):
            raise SpecError(
                f"schedule: late=2 needs stages=2 or more and throttle=0, not stages={self.stages} and "
                f"throttle={self.throttle}"
            )
        if self.bare not in (0, 1) or (self.bare and self.digits):
            raise SpecError(f"schedule: bare={self.bare} must be 0, or 1 with digits=0, not digits={self.digits}")
        if self.resident and self.throttle:
            raise SpecError(f"schedule: throttle={self.throttle} is for copies; with resident=1 it must be 0")
        zeros = {"max_blocks": "as many as fit", "least_blocks": "as many as have work", "throttle": "as many as fit"}
        for name, zero in zeros.items():
            if getattr(self, name) < 0:
                raise SpecError(f"schedule: {name}={getattr(self, name)} must be 0 ({zero}) or more")
        if self.step_k < 16 or self.step_k % 16:
            raise SpecError(f"schedule: step_k={self.step_k} must be a positive multiple of 16")
        if self.threads > 1024:
            raise SpecError(f"schedule: warps_n*warps_k={self.threads // 32} must be at most 32 warps")

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k

    @property
    def mma_columns(self) -> int:
        """Of the products: an mma has eight, of which a single token uses one (or digits four)."""
        return max(8, self.tokens)

    @property
    def columns(self) -> int:
        """Of the sums a block ends with: digits leave one for their token."""
        return 1 if self.digits else self.mma_columns

    @property
    def rows(self) -> int:
        """Rows of the weight per block."""
        return 16 * self.row_blocks * self.warps_n


@dataclass(frozen=True)
class Launch:
    """How to start a compiled kernel. `params` names the arguments in order: device pointers "x", "codes",
    "scales", "zeros", "bias", "y", "workspace" and the i32 "m"."""

    name: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    params: tuple[str, ...]
    workspace_bytes: int = 0  # zero before the first launch; then as the last launch of the same kernel left it
