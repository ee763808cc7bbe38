"""What to compute: `MatmulSpec`, the one value a user writes and every stage reads.

    y[t, n] = sum_k x[t, k] * W[n, k] + bias[n]
    W[n, k] = s[n, k // g] * (decode(code[n, k]) - z[n, k // g])     or, with zeros="offset",
    W[n, k] = s[n, k // g] * decode(code[n, k]) + o[n, k // g]       where a scale r[n] per row may multiply s and o,
                                                                     and outliers S[n, k] may be added

A spec is frozen and hashable, so it is a cache key; it is checked when it is made, so that nothing later
has to. It is a facade of four parts, values of their own that check their fields and derive what needs no other part:
`Shape`, `WeightFormat`, `Call`, and the epilogue. Here stands what needs several of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, ref

from lowbit.dialect import byte_products
from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.call import Act, Call, Out
from lowbit.dialect.elements import ELEMENTS, Element
from lowbit.dialect.epilogue import ACTIVATIONS, EPILOGUES, RESIDUAL, Epilogue
from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import choice, in_json
from lowbit.dialect.formats import byte_codes
from lowbit.dialect.formats.byte_codes import Compute
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.packing import ROWS, Packing
from lowbit.dialect.presets import preset_fields
from lowbit.dialect.shape import Shape
from lowbit.dialect.top_k import TopK
from lowbit.dialect.weight import Storage, TensorSlot, in_memory
from lowbit.dialect.weight_format import Scale, WeightFormat, Zeros

VERSION = 1  # of `MatmulSpec.to_dict`
Part = TypeVar("Part", Shape, WeightFormat, Call)

_FIELDS = {part: tuple(f.name for f in fields(part)) for part in (Shape, WeightFormat, Call)}


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
    fold_scales whether kernels for many tokens round scaled weights to the type of products, `compute`, so that sums
                stay in the tensor core for all columns: weights of any format then. One with groups has row_scales,
                which `pack` chooses
    compute_from  rows of x from which on they are quantized for `compute`; a call with fewer rows multiplies in act,
                which is faster for the few tokens of decoding. Of several experts: rows that an expert has on average
    out         type of y and of the bias; None: as act
    bias        whether bias[n] is added
    table       the 2^b values of weight="lut<b>": a sequence, array or tensor, kept as a tuple of floats
    row_scales  whether every row has an f32 scale besides those of its groups: NVFP4's scale per tensor, say
    permuted    whether columns are stored in another order than x's, which the weight says (GPTQ's act-order): column j
                of codes and groups is W[:, permutation[j]]; every expert has an order of its own
    outliers    whether a sparse matrix S of f16 numbers is added to the weight
    bilevel     the second level of scales (zeros, offsets) that are codes: a `Bilevel` (K-quants, SpQR, nested NF4)
    epilogue    what becomes of sums before they are y (`dialect.epilogue`): "silu_mul", "gelu_mul" and "swiglu_oai"
                multiply the activated first half of the rows by the second, so y is [m, n / 2]; "residual" adds an
                argument of the call; None: nothing
    experts     how many experts of n / experts rows each the weight has, one after the other. Rows of x come sorted by
                expert then, and y has n / experts columns (`lowbit.expert_matmul` in the IR); 1: all rows meet every x
    top_k       a `TopK`: rows of x are tokens in their order, and ids say which experts each goes to
                (`lowbit.top_k_expert_matmul`); None: they come sorted
    invariant   whether a row of x gives the same bits in every call, whatever rows are beside it and however many: all
                kernels that serve the matmul add up in one order then (docs/invariant.md)

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
    experts: int = 1
    top_k: TopK | None = None
    invariant: bool = False

    def __post_init__(self) -> None:
        shape = self._part(Shape)
        if self.group_size is not None:
            object.__setattr__(self, "group_size", shape.group_size(self.group_size))
        call, format = self._part(Call), self._part(WeightFormat)
        if byte_products.folds(format, call):
            format = replace(format, row_scales=True)
        self._take(shape=shape, format=format, call=call)
        self._check_together()

    def _take(self, **parts: Shape | WeightFormat | Call) -> None:
        """Keep parts, and their fields as they have checked them."""
        for name, part in parts.items():
            object.__setattr__(self, name, part)
            for field in _FIELDS[type(part)]:
                object.__setattr__(self, field, getattr(part, field))

    def _check_together(self) -> None:
        """Raises SpecError for parts that do not go together."""
        if self.bilevel:
            self.bilevel.check_groups(self.groups)
        if self.compute:
            byte_products.check_byte_products(self.format, self.packing, self.call)
        if self.invariant and self.compute and not self.multiplies_codes:
            given = f"({self}) are scaled and rounded before they are multiplied in {self.compute}"
            raise SpecError(f"invariant=True multiplies codes as they are, and those of {given}; use compute=None")
        if self.epilogue is not None:
            choice("epilogue", self.epilogue, EPILOGUES)
        if self.is_gated:
            self._check_gated()
        if self.experts > 1:
            self._check_experts()

    def _check_experts(self) -> None:
        """Raises SpecError unless rows can be shared out between experts, each with row blocks of its own."""
        unit = ROWS * self.experts
        if self.n % unit:
            rule = f"experts={self.experts} needs n={self.n}, the rows of all, to be a multiple of {unit}"
            raise SpecError(f"{rule}: {ROWS} for each; pad every expert's rows")
        if self.epilogue == RESIDUAL:
            fix = "drop it, and add the residual to the sum of a token's experts"
            raise SpecError(f"experts={self.experts} has no epilogue='residual'; {fix}")

    def _check_gated(self) -> None:
        """Raises SpecError unless the halves of a gated MLP can share row blocks."""
        given = f"epilogue={self.epilogue!r}"
        if self.n % ROWS:
            above = -(-self.n // ROWS) * ROWS
            raise SpecError(f"{given} needs n={self.n} to be a multiple of {ROWS}; pad both halves to n={above} in all")
        if self.bilevel and self.bilevel.rows == ROWS:
            fix = "use a second level of rows=1, or two matmuls with epilogue=None"
            raise SpecError(f"{given} has rows of both halves in a block, which bilevel rows={ROWS} would share; {fix}")

    @classmethod
    def of(
        cls, shape: Shape, format: WeightFormat, call: Call | None = None, epilogue: Epilogue | None = None
    ) -> MatmulSpec:
        """Returns the spec that is made of these parts; without a call, x and y are f16.

        Raises SpecError for parts that do not go together.
        """
        parts = (shape, format, call or Call())
        given = {name: getattr(part, name) for part in parts for name in _FIELDS[type(part)]}
        return cls(**given, epilogue=epilogue)

    def _part(self, part: type[Part]) -> Part:
        return part(**{name: getattr(self, name) for name in _FIELDS[part]})

    @cached_property
    def shape(self) -> Shape:
        """The part of the spec that says how large the weight is: n and k."""
        return self._part(Shape)

    @cached_property
    def format(self) -> WeightFormat:
        """The part of the spec that says what is stored of the weight."""
        return self._part(WeightFormat)

    @cached_property
    def call(self) -> Call:
        """The part of the spec that says in which types the weight is multiplied."""
        return self._part(Call)

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
        return self.format.dtype

    @property
    def x(self) -> Element:
        """The type of the activation's numbers as they are multiplied."""
        return self.call.x

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
        return self.folds and byte_products.folds_in_f16(self.format)

    @cached_property
    def multiplies_codes(self) -> bool:
        """Whether codes less zeros can be multiplied as bytes whose products are scaled, with `compute`."""
        return byte_products.multiplies_codes(self.format, self.packing, self.call)

    def rounds_weights(self, m: int) -> bool:
        """Whether weights that m tokens are multiplied by are rounded; of experts: m tokens of one, or a tile of m."""
        few = (m <= byte_codes.MOST_UNFOLDED or self.invariant) and self.multiplies_codes
        return self.folds and not few

    def for_tokens(self, m: int) -> MatmulSpec:
        """This matmul as it is computed for up to m tokens: without folded scales where weights are not rounded."""
        return self.without_folds if self.folds and not self.rounds_weights(m) else self

    @cached_property
    def without_folds(self) -> MatmulSpec:
        """This matmul with scales that multiply sums of products, and are not folded into weights."""
        return replace(self, fold_scales=False)

    def for_rows(self, m: int) -> MatmulSpec:
        """This matmul as a call with m rows in the act type computes it, of experts with m slots: without `compute`
        below `first_in_eight_bits`."""
        if self.compute_from == 1:
            return self
        return self.in_eight_bits if m >= self.first_in_eight_bits else self.in_act

    @property
    def first_in_eight_bits(self) -> int:
        """The number of rows, or of the slots of all experts, from which on `compute` holds."""
        return self.compute_from * self.experts

    @property
    def kinds(self) -> tuple[MatmulSpec, ...]:
        """The specs of `for_rows` for few rows and for many: one, or two with `compute_from`."""
        return (self,) if self.compute_from == 1 else (self.in_act, self.in_eight_bits)

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
        """Columns of y: n, or half of it where the epilogue multiplies two halves; of several experts, those of one."""
        return self.n // self.experts // (2 if self.is_gated else 1)

    @property
    def call_inputs(self) -> tuple[str, ...]:
        """The arguments of a call besides x and the weight, which kernels take behind the weight's tensors."""
        if self.top_k:
            return self.top_k.arguments
        if self.experts > 1:
            return ("rows", "tiles")
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
        return self.format.packing(self.shape)

    @cached_property
    def groups(self) -> int:
        """Scales per row of the weight, without padding."""
        return 1 if self.group_size is None else self.k // self.group_size

    @property
    def out_dtype(self) -> Out:
        """Type of y and of the bias."""
        return self.out or self.act

    @cached_property
    def zero_kind(self) -> Storage | None:
        """Type of a zero in memory: u8 for integers; for floats the scale's, or act where that has 8 bits; with two
        levels the scale's."""
        return self.format.zero_kind(self.act)

    @cached_property
    def offset_kind(self) -> Storage | None:
        """Type of an offset in memory: the scale's, or act where that has 8 bits; with two levels the scale's."""
        return self.format.offset_kind(self.act)

    @cached_property
    def scale_kind(self) -> Storage:
        """Type of a scale in memory: u8 for codes that are integers, or places in a table."""
        return self.format.scale_kind

    @cached_property
    def zero_span(self) -> int:
        """Integer zeros are lo .. lo + this. In bf16 up to 7 bits are decoded by taking away 128 + zero - lo, which is
        exact up to 256."""
        return self.format.zero_span(self.act)

    @cached_property
    def tensors(self) -> tuple[TensorSlot, ...]:
        """The tensors of a packed weight, in the order in which operators and kernels take them."""
        return in_memory(self.given_tensors)

    @cached_property
    def given_tensors(self) -> tuple[TensorSlot, ...]:
        """The tensors that `pack` takes: `tensors`, but for codes that share their bytes there."""
        return self.format.tensors(self.packing, self.call)

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
        values = ((f, getattr(self, f.name)) for f in fields(self))
        return {"version": VERSION, **{f.name: in_json(value) for f, value in values if value != f.default}}

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
        bias = " + bias" if self.bias else ""
        epilogue = f", {self.epilogue}" if self.epilogue else ""
        return f"{self.format.described(self.shape)}: {self.call}{bias}{epilogue}"


_interned: WeakKeyDictionary[MatmulSpec, ref[MatmulSpec]] = WeakKeyDictionary()


def interned(spec: MatmulSpec) -> MatmulSpec:
    """Returns the one object that stands for all specs equal to `spec`, so that calls can compare by identity."""
    known = _interned.get(spec)
    found = known() if known else None
    if found is None:
        _interned[spec] = ref(spec)
        return spec
    return found
