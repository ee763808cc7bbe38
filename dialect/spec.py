"""What to compute: `MatmulSpec`, the one value a user writes and every stage reads.

    y[t, n] = sum_k x[t, k] * W[n, k] + bias[n]
    W[n, k] = s[n, k // g] * (decode(code[n, k]) - z[n, k // g])     or, with zeros="offset",
    W[n, k] = s[n, k // g] * decode(code[n, k]) + o[n, k // g]       where a scale r[n] per row may multiply s and o,
                                                                     and outliers S[n, k] may be added

A spec is frozen and hashable, so it is a cache key; it is checked when it is made, so that nothing later
has to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary, ref

from lowbit.dialect.bilevel import SCALE_CODES, TABLE_CODE, Bilevel, check_bilevel
from lowbit.dialect.elements import ELEMENTS, Element
from lowbit.dialect.epilogue import ACTIVATIONS, EPILOGUES, RESIDUAL, Epilogue
from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import boolean, choice, did_you_mean, floats, integer
from lowbit.dialect.formats import byte_codes
from lowbit.dialect.formats.byte_codes import COMPUTE, Compute
from lowbit.dialect.formats.dtypes import DType, all_names, dtype
from lowbit.dialect.formats.names import plain_name, short_name, weight_advice
from lowbit.dialect.formats.packing import ROWS, Packing
from lowbit.dialect.formats.recipes import compute_element, exponent
from lowbit.dialect.presets import preset_fields
from lowbit.dialect.weight import Storage, TensorSlot, in_memory, weight_tensors

Zeros = Literal["none", "int", "float", "offset"]
Scale = Literal["f16", "bf16", "f32", "e8m0", "e4m3", "u3", "u4", "u6", "u8", "i6", "i8", "lut8"]
Act = Literal["f16", "bf16"]
Out = Literal["f16", "bf16", "f32"]

SCALES = ("f16", "bf16", "f32", "e8m0", "e4m3", *SCALE_CODES, TABLE_CODE)
VERSION = 1  # of `MatmulSpec.to_dict`
MIN_K = 16  # the K of the mma: shorter groups and shorter rows would share a fragment


@dataclass(frozen=True)
class MatmulSpec:
    """A matmul with a low-bit weight W [n, k].

    n, k        rows and columns of the weight; k >= 16
    weight      element format, see `dialect.formats.dtypes`: "u4", "i3", "f6e3m2", "nf4", "lut4" ...
    group_size  columns that share a scale (and zero): a divisor of k, at least 16; None: one per row
    zeros       "none"; "float"; "int", integers lo .. lo+255 with lo the least value of a u<b> or i<b> format, for bf16
                and less than 8 bits lo .. lo+128; "offset": none, but a number per group that is added after scaling
    scale       type of the scales; e8m0 is a power of two (MX formats), e4m3 is NVFP4's; "u3", "u4", "u6", "u8", "i6"
                and "i8" are codes, of which `bilevel` makes numbers; "lut8" are places in its table
    act         type of x
    compute     type in which codes and x are multiplied: "f8e4m3" or "i8", for which x is quantized to 8 bits with a
                scale per row (`lowbit.quantize_activation`); None: act
    fold_scales whether kernels for many tokens round scaled weights to the type of products, "f8e4m3", so that sums
                stay in the tensor core for all columns: weights of any format then. One with groups has row_scales,
                which `pack` chooses
    compute_from  rows of x from which on they are quantized for `compute`; a call with fewer rows multiplies in act,
                which is faster for the few tokens of decoding
    out         type of y and of the bias; None: as act
    bias        whether bias[n] is added
    table       the 2^b values of weight="lut<b>": a sequence, array or tensor, kept as a tuple of floats
    row_scales  whether every row has an f32 scale besides those of its groups: NVFP4's scale per tensor, say
    permuted    whether columns are stored in another order than x's, which the weight says (GPTQ's act-order): column j
                of codes and groups is W[:, permutation[j]]
    outliers    whether a sparse matrix S of f16 numbers is added to the weight
    bilevel     the second level of scales (zeros, offsets) that are codes: a `Bilevel` (K-quants, SpQR, nested NF4)
    epilogue    what becomes of sums before they are y (`dialect.epilogue`): "silu_mul" and "gelu_mul" multiply the
                activated first half of the rows by the second, so y is [m, n / 2]; "residual" adds an argument of the
                call; None: nothing

    Types may also be given as torch has them: act=torch.float16 and act="float16" are kept as "f16".

    Raises SpecError that names the field, what was given, what is allowed, and a fix.
    """

    n: int
    k: int
    weight: str
    group_size: int | None = None
    zeros: Zeros = "none"
    scale: Scale = "f16"
    act: Act = "f16"
    out: Out | None = None
    bias: bool = False
    table: tuple[float, ...] | None = None
    row_scales: bool = False
    permuted: bool = False
    outliers: bool = False
    bilevel: Bilevel | None = None
    compute: Compute | None = None
    fold_scales: bool = False
    compute_from: int = 1
    epilogue: Epilogue | None = None

    def __post_init__(self) -> None:
        normal = dict[str, object](
            n=integer("n", self.n, 1),
            k=integer("k", self.k, MIN_K),
            zeros=choice("zeros", self.zeros, ("none", "int", "float", "offset")),
            scale=choice("scale", short_name(self.scale), SCALES),
            act=choice("act", short_name(self.act), ("f16", "bf16")),
            out=None if self.out is None else choice("out", short_name(self.out), ("f16", "bf16", "f32")),
            bias=boolean("bias", self.bias),
            outliers=boolean("outliers", self.outliers),
            table=None if self.table is None else floats("table", self.table),
            row_scales=boolean("row_scales", self.row_scales),
            permuted=boolean("permuted", self.permuted),
            bilevel=None if self.bilevel is None else Bilevel.read(self.bilevel),
            compute=None if self.compute is None else _compute(self.compute),
            fold_scales=boolean("fold_scales", self.fold_scales),
            compute_from=integer("compute_from", self.compute_from, 1),
            epilogue=None if self.epilogue is None else choice("epilogue", self.epilogue, EPILOGUES),
        )
        for name, value in normal.items():
            object.__setattr__(self, name, value)
        if self.group_size is not None:
            object.__setattr__(self, "group_size", _group_size(self.group_size, self.k))
        check_bilevel(self.scale, self.group_size, self.groups, self.bilevel)
        self._check_weight()
        if self.compute:
            self._check_compute(self.compute)
        elif self.fold_scales:
            raise SpecError("fold_scales=True needs compute='f8e4m3'; use both, or fold_scales=False")
        elif self.compute_from > 1:
            raise SpecError(f"compute_from={self.compute_from} needs compute='f8e4m3' or 'i8'; name one, or drop it")
        if self.folds:
            object.__setattr__(self, "row_scales", True)
        if self.is_gated:
            self._check_gated()

    def _check_gated(self) -> None:
        """Raises SpecError unless the halves of a gated MLP can share row blocks."""
        given = f"epilogue={self.epilogue!r}"
        if self.n % ROWS:
            above = -(-self.n // ROWS) * ROWS
            raise SpecError(f"{given} needs n={self.n} to be a multiple of {ROWS}; pad both halves to n={above} in all")
        if self.bilevel and self.bilevel.rows == ROWS:
            fix = "use a second level of rows=1, or two matmuls with epilogue=None"
            raise SpecError(f"{given} has rows of both halves in a block, which bilevel rows={ROWS} would share; {fix}")

    def _check_compute(self, compute: Compute) -> None:
        """Raises SpecError unless this weight can be multiplied by activations of 8 bits."""
        given, columns = f"compute={compute!r}", byte_codes.SUM_COLUMNS
        if self.fold_scales and compute != "f8e4m3":
            raise SpecError(f"fold_scales=True needs compute='f8e4m3', not {compute!r}: a scaled integer is none")
        if not self.folds and (why := self._misfit_of_codes(compute)):
            raise SpecError(f"{given} {why}, or compute=None")
        for name in ("permuted", "outliers"):
            if getattr(self, name):
                raise SpecError(f"{given} has no {name}=True; use {name}=False, or compute=None")
        if self.k % columns or self.k > byte_codes.MOST_COLUMNS:
            most = byte_codes.MOST_COLUMNS
            raise SpecError(f"{given} needs k={self.k} to be a multiple of {columns} up to {most}; use compute=None")
        least = MIN_K if self.folds else columns
        if self.group_size and (self.group_size % least or self.packing.pads_groups):
            raise SpecError(f"{given} needs {self._rule_of_groups(least)}; use compute=None")
        if self.group_size and not (self.multiplies_codes or byte_codes.fits_rounds(self.group_size)):
            rule = "a divisor of 1536 or 2048, or a multiple of 512"
            raise SpecError(f"{given} needs group_size={self.group_size} to be {rule}; use one, or compute=None")
        if self.folds and self.scale in ("e8m0", "e4m3") and "bf16" in (self.zero_kind, self.offset_kind):
            what = f"fold_scales=True with scale={self.scale!r} and zeros={self.zeros!r}"
            raise SpecError(f"{what} needs act='f16', in which kernels read such zeros; or scale='bf16' or 'f32'")

    def _misfit_of_codes(self, compute: Compute) -> str:
        """Returns why codes less zeros cannot be multiplied as bytes whose products are scaled, and what to use; "" if
        they can."""
        fold = ", or fold_scales=True and groups" if compute == "f8e4m3" else ""
        if not byte_codes.fits(self.dtype, compute):
            fitting = ", ".join(byte_codes.fitting_names(compute))
            return f"multiplies {fitting}, not {self.weight!r}; use one of them{fold}"
        if self.zeros not in ("none", "int"):
            return f"has no zeros={self.zeros!r}; use 'int' or 'none'{fold}"
        if self.bilevel:
            return f"has no bilevel=; use scales that are numbers{fold}"
        if self.group_size and self.group_size % byte_codes.SUM_COLUMNS:
            return f"needs {self._rule_of_groups(byte_codes.SUM_COLUMNS)}; use one{fold}"
        return ""

    def _rule_of_groups(self, least: int) -> str:
        """Says which groups have products of bytes: multiples of `least` columns that need no padding."""
        chunk = self.packing.chunk
        return f"group_size={self.group_size} to be a multiple of {least} that divides {chunk} or is a multiple of it"

    def _check_weight(self) -> None:
        given = plain_name(self.weight)
        known = (*all_names(), *(f"lut{b}" for b in range(1, 9)))
        if not isinstance(given, str):
            raise SpecError(f"weight={given!r} must be the name of a format, such as 'u4', 'f6e3m2' or 'nf4'")
        try:
            kind = dtype(given, self.table).kind
        except SpecError as error:
            hint = "" if given in known else did_you_mean(given, known)
            if advice := weight_advice(given):
                raise SpecError(f"weight={given!r}: use {advice}") from None
            raise SpecError(f"weight: {error}{hint}") from None
        if self.zeros == "int" and kind not in ("uint", "int"):
            raise SpecError(
                f"zeros='int' needs an integer weight (u1..u8, i1..i8), not {given!r}; use 'float' or 'none'"
            )

    @classmethod
    def preset(cls, name: str, n: int, k: int, **others: Any) -> MatmulSpec:
        """Returns the spec of a weight [n, k] that has a name, such as "mxfp4", "nvfp4", "q4_k" or "spqr".

        others: fields such as act, out and bias, or in place of the preset's: preset("gptq4", n, k, group_size=64)

        Raises SpecError for names that are not in `dialect/presets.py`, and for shapes that groups do not divide.
        """
        return cls(n, k, **{**preset_fields(name, k), **others})

    @cached_property
    def dtype(self) -> DType:
        """The element format."""
        return dtype(self.weight, self.table)

    @property
    def x(self) -> Element:
        """The type of the activation's numbers as they are multiplied."""
        return ELEMENTS[(self.compute or self.act).removeprefix("f8")]

    @property
    def byte_type(self) -> Compute:
        """`compute` of a spec that has one. Raises SpecError for others."""
        if self.compute is None:
            raise SpecError(f"({self}) has no activations of 8 bits; it needs compute='f8e4m3' or 'i8'")
        return self.compute

    @property
    def folds(self) -> bool:
        """Whether kernels for many tokens round weights: scales of rows multiply sums, without rounding."""
        return self.fold_scales and self.group_size is not None

    @cached_property
    def folds_in_f16(self) -> bool:
        """Tells whether kernels that fold scales multiply codes by them in f16, and round scales of other types to it:
        where nothing but integer zeros is added, and codes are numbers of f16 as they stand."""
        if not self.folds or self.bilevel or self.zeros not in ("none", "int"):
            return False
        t = self.dtype
        return compute_element(t, "f16") == "f16" and (t.kind != "table" or not exponent(t, "f16"))

    @cached_property
    def multiplies_codes(self) -> bool:
        """Whether codes less zeros can be multiplied as bytes whose products are scaled, with `compute`."""
        return self.compute is not None and not self._misfit_of_codes(self.compute)

    def rounds_weights(self, m: int) -> bool:
        """Whether weights that m tokens are multiplied by are rounded."""
        return self.folds and (m > byte_codes.MOST_UNFOLDED or not self.multiplies_codes)

    def for_tokens(self, m: int) -> MatmulSpec:
        """This matmul as it is computed for up to m tokens: without folded scales where weights are not rounded."""
        return replace(self, fold_scales=False) if self.folds and not self.rounds_weights(m) else self

    def for_rows(self, m: int) -> MatmulSpec:
        """This matmul as a call with m rows in the act type computes it: without `compute` below `compute_from`."""
        if self.compute_from == 1:
            return self
        return self.in_eight_bits if m >= self.compute_from else self.in_act

    @cached_property
    def in_eight_bits(self) -> MatmulSpec:
        """This matmul with any number of rows in 8 bits."""
        return replace(self, compute_from=1)

    @cached_property
    def in_act(self) -> MatmulSpec:
        """This matmul with any number of rows in the act type: its weight has the same tensors."""
        return replace(self, compute=None, fold_scales=False, compute_from=1)

    @property
    def is_gated(self) -> bool:
        """Tells whether the epilogue multiplies the halves of a gated MLP."""
        return self.epilogue in ACTIVATIONS

    @property
    def outputs(self) -> int:
        """Columns of y: n, or half of it where the epilogue multiplies two halves."""
        return self.n // 2 if self.is_gated else self.n

    @property
    def call_inputs(self) -> tuple[str, ...]:
        """The arguments of a call besides x and the weight, which kernels take behind the weight's tensors."""
        return (RESIDUAL,) if self.epilogue == RESIDUAL else ()

    @cached_property
    def call_operands(self) -> tuple[str, ...]:
        """The names of what kernels take besides x: the weight's tensors, and behind them `call_inputs`."""
        return (*(slot.name for slot in self.tensors), *self.call_inputs)

    @cached_property
    def without_epilogue(self) -> MatmulSpec:
        """This matmul as far as its sums, h [m, n], whose weight has the same tensors: columns of h are in the order in
        which a gated one's rows are stored (`dialect.epilogue.stored_rows`)."""
        return replace(self, epilogue=None)

    @property
    def y(self) -> Element:
        """The type of the result's numbers."""
        return ELEMENTS[self.out_dtype]

    @cached_property
    def packing(self) -> Packing:
        """How the weight sits in memory."""
        return Packing(self.dtype.bits, self.n, self.k, self.group_size)

    @property
    def groups(self) -> int:
        """Scales per row of the weight, without padding."""
        return 1 if self.group_size is None else self.k // self.group_size

    @property
    def out_dtype(self) -> Out:
        """Type of y and of the bias."""
        return self.out or self.act

    @property
    def zero_kind(self) -> Storage | None:
        """Type of a zero in memory: u8 for integers; for floats the scale's, or act where that has 8 bits; with two
        levels the scale's."""
        if self.zeros == "int":
            return "u8"
        return self._float_kind if self.zeros == "float" else None

    @property
    def offset_kind(self) -> Storage | None:
        """Type of an offset in memory: the scale's, or act where that has 8 bits; with two levels the scale's."""
        return self._float_kind if self.zeros == "offset" else None

    @property
    def _float_kind(self) -> Storage:
        if self.bilevel:
            return self.scale_kind
        return self.act if self.scale in ("e8m0", "e4m3") else self.scale_kind

    @property
    def scale_kind(self) -> Storage:
        """Type of a scale in memory: u8 for codes that are integers, or places in a table."""
        return "u8" if self.scale in (*SCALE_CODES, TABLE_CODE) else cast(Storage, self.scale)

    @property
    def zero_span(self) -> int:
        """Integer zeros are lo .. lo + this. In bf16 up to 7 bits are decoded by taking away 128 + zero - lo, which is
        exact up to 256."""
        return 128 if self.act == "bf16" and self.dtype.bits < 8 else 255

    @cached_property
    def tensors(self) -> tuple[TensorSlot, ...]:
        """The tensors of a packed weight, in the order in which operators and kernels take them."""
        return in_memory(self.given_tensors)

    @cached_property
    def given_tensors(self) -> tuple[TensorSlot, ...]:
        """The tensors that `pack` takes: `tensors`, but for codes that share their bytes there."""
        return weight_tensors(
            self.packing,
            self.scale_kind,
            zero=self.zero_kind,
            offset=self.offset_kind,
            row_scale="f32" if self.row_scales else None,
            bias=self.out_dtype if self.bias else None,
            outliers="i32" if self.outliers else None,
            permutation="i32" if self.permuted else None,
            bilevel=self.bilevel,
            integer_zeros=self.zeros == "int",
            code=self.scale,
        )

    def slot(self, name: str) -> TensorSlot:
        """The tensor of this name that `pack` takes. Raises KeyError where there is none."""
        slots = {slot.name: slot for slot in self.given_tensors}
        if name not in slots:
            raise KeyError(f"{name!r} must be one of {', '.join(slots)}")
        return slots[name]

    @cached_property
    def bytes(self) -> int:
        """Bytes of the packed weight without its outliers: what one call reads, x aside."""
        return sum(slot.nbytes for slot in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Returns the spec in terms of JSON, without the fields that have their defaults."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        given = {f.name: values[f.name] for f in fields(self) if values[f.name] != f.default}
        if self.table is not None:
            given["table"] = list(self.table)
        if self.bilevel is not None:
            given["bilevel"] = self.bilevel.to_dict()
        return {"version": VERSION, **given}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> MatmulSpec:
        """Returns the spec that `to_dict` wrote. Raises SpecError for anything else."""
        if not isinstance(cast(object, written), Mapping):
            raise SpecError(f"a spec must be written as a dictionary, not {type(written).__name__}")
        values = dict(written)
        version = values.pop("version", None)
        if version != VERSION:
            raise SpecError(f"a spec of version {version!r} can't be read, only version {VERSION}; update lowbit")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(map(repr, values.keys() - known)):
            raise SpecError(f"a spec has no {', '.join(unknown)}; update lowbit, or drop it")
        if missing := [name for name in ("n", "k", "weight") if name not in values]:
            raise SpecError(f"a spec must have {', '.join(missing)}")
        return cls(**values)

    def __str__(self) -> str:
        group = "row" if self.group_size is None else str(self.group_size)
        zeros = {"none": "", "offset": ", offsets"}.get(self.zeros, f", {self.zeros} zeros")
        others = (", row scales" if self.row_scales else "") + (", permuted" if self.permuted else "")
        bias = " + bias" if self.bias else ""
        outliers = " + outliers" if self.outliers else ""
        scale = self.scale if self.bilevel is None else f"{self.scale} * {self.bilevel.scale}"
        compute = f" in {self.compute}" if self.compute else ""
        compute += ", folded" if self.fold_scales else ""
        compute += f", from {self.compute_from} rows on" if self.compute_from > 1 else ""
        weight = f"{self.weight}[{self.n}, {self.k}] {scale} scale per {group}{zeros}{others}{outliers}"
        epilogue = f", {self.epilogue}" if self.epilogue else ""
        return f"{weight}: {self.act}{compute} -> {self.out_dtype}{bias}{epilogue}"


_interned: WeakKeyDictionary[MatmulSpec, ref[MatmulSpec]] = WeakKeyDictionary()


def interned(spec: MatmulSpec) -> MatmulSpec:
    """Returns the one object that stands for all specs equal to `spec`, so that calls can compare by identity."""
    known = _interned.get(spec)
    found = known() if known else None
    if found is None:
        _interned[spec] = ref(spec)
        return spec
    return found


def _group_size(given: object, k: int) -> int:
    g = integer("group_size", given, 1)
    if g >= MIN_K and k % g == 0:
        return g
    small = [d for d in range(1, math.isqrt(k) + 1) if k % d == 0]
    divisors = sorted(d for d in {*small, *(k // d for d in small)} if d >= MIN_K)
    below, above = [d for d in divisors if d < g][-1:], [d for d in divisors if d > g][:1]
    rule = f"must divide k={k}" if g >= MIN_K else f"must be at least {MIN_K} and divide k={k}"
    fix = " or ".join(str(d) for d in below + above)
    raise SpecError(f"group_size={g} {rule}; try {fix}, or None for one scale per row")


def _compute(given: object) -> str:
    """The type of products, under any of its names."""
    names = {"e4m3": "f8e4m3", "int8": "i8", "s8": "i8"}
    short = plain_name(short_name(given))
    return choice("compute", names.get(str(short), str(short)), COMPUTE)
