"""`QuantConfig`, which says how `lowbit.quantize` treats a weight, and the recipes that have a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import lcm
from typing import Any, Literal

from lowbit.dialect.bilevel import SCALE_CODES, Bilevel
from lowbit.dialect.call import Act, Call
from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import boolean, choice, in_json
from lowbit.dialect.formats.byte_codes import SUM_COLUMNS, Compute
from lowbit.dialect.formats.dtypes import DType, dtype
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.presets import PRESETS as PRESET_SPECS
from lowbit.dialect.shape import MIN_K
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight_format import Scale, WeightFormat, Zeros

Method = Literal["rtn", "hqq", "gptq", "awq", "signround", "spqr"]
Clip = Literal["output", "mse", "max", "ocp"]
METHODS = ("rtn", "hqq", "gptq", "awq", "signround", "spqr")
CALIBRATED = ("gptq", "awq", "signround", "spqr")  # methods that look at the inputs of the layer
INTEGERS_ONLY = ("hqq", "signround", "spqr")
FLOAT_ZEROS = ("hqq", "spqr")  # methods that choose zeros which are no integers
BY_COLUMNS = ("gptq", "spqr")  # methods that round a column at a time, and have `beams`
CLIPS = ("output", "mse", "max", "ocp")
MAX_BEAMS = 1024
VERSION = 1  # of `QuantConfig.to_dict`
_OF_WEIGHT = ("weight", "group_size", "zeros", "scale")  # fields that every spec of a configuration has in common
_OF_SPEC = {f.name for part in (WeightFormat, Call) for f in fields(part)}.difference(_OF_WEIGHT)
"""What a configuration calls like one of these is that field of its specs, unless a spec is asked for with another."""


@dataclass(frozen=True)
class QuantConfig:
    """How to quantize a weight.

    weight      element format, as in `MatmulSpec`: "u4", "i3", "f6e3m2", "nf4", "lut4" ...
    group_size  columns that share a scale (and zero): a divisor of k, at least 16; None: one per row
    zeros       "none", "int", "float" or "offset"; None: "float" for HQQ and SpQR, else "int" for u<b> and "none" for
                all others
    scale       type of the scales: "f16", "bf16", "f32", "e8m0" or "e4m3"; with bilevel= the format of codes, "u6" say.
                None: "bf16" for weights or layers in bf16, which multiply fastest by it, "f16" for all others and
                where zeros or offsets are not integers
    bilevel     the second level of scales and offsets that are codes, as K-quants have it: Bilevel(groups=8)
    method      "rtn", "hqq", "gptq", "awq", "signround" or "spqr"; the last four need calibration data. None: "hqq" for
                integers with float zeros that are not symmetric, else "rtn"
    table       the 2^b values of weight="lut<b>"
    row_scales  give every row an f32 factor, with which its largest scale is the largest of its type: for e4m3 scales
    symmetric   keep every zero at the middle of the codes (8 for u4 and integer zeros, 7.5 for float zeros)
    clip        "output": for each group, search the range with the least error, where errors count by what carries the
                output: by the size of weights without data, by importances and by output errors with them; "mse":
                search the range whose squared error is least; "max": the whole range of the group. For e8m0 scales
                "max" is the rule of the MX specification, which is called "ocp", too. SpQR searches for the codes of
                scale and zero whose output error is least with "output" and "mse" alike
    calibration what rounding to nearest takes from calibration data: "importance", the mean square of each column's
                inputs, by which errors count in the search (llama.cpp's importance matrix); "hessian": each row takes
                those ranges that have the least output error. None: nothing, so that it needs no data
    damping     GPTQ and SpQR add this part of the mean diagonal to the diagonal of the Hessian
    beams       how many ways to round a row GPTQ and SpQR follow at a time; 1: the methods of the papers. More take
                that much longer and lose less, and GPTQ then rounds columns in the order of `act_order`
    steps       how many steps SignRound takes
    compute     type in which layers multiply codes and x, as in `MatmulSpec`: "f8e4m3" or "i8"; None: that of x. The
                weight is rounded in the same way
    fold_scales with compute: round scaled weights to it where many tokens are multiplied, as in `MatmulSpec`
    compute_from  with compute: multiply fewer tokens in the type of x, as in `MatmulSpec`
    invariant   give a token the same bits whatever tokens are beside it, as in `MatmulSpec`

    Of SpQR:

    outlier_threshold  weights whose error is above this part of the mean are outliers: the less, the more there are;
                       None: there are none
    scale_bits         bits of the codes of scales and zeros, which have a second level of scale and zero
    scale_rows         rows that share the second level. Codes of 3, 4, 6 or 8 bits over 16 rows are stored as such, all
                       others as the f16 values that they stand for
    act_order          round first the columns whose errors others make up for worst, and store columns in that order

    Raises SpecError that names the field, what was given, and what is allowed.
    """

    weight: str = "u4"
    group_size: int | None = 128
    zeros: Zeros | None = None
    scale: Scale | None = None
    method: Method | None = None
    table: tuple[float, ...] | None = None
    symmetric: bool = False
    clip: Clip = "output"
    damping: float = 0.01
    steps: int = 200
    outlier_threshold: float | None = 0.2
    scale_bits: int = 3
    scale_rows: int = 16
    act_order: bool = False
    compute: Compute | None = None
    bilevel: Bilevel | None = None
    row_scales: bool = False
    beams: int = 1
    fold_scales: bool = False
    compute_from: int = 1
    calibration: Literal["importance", "hessian"] | None = None
    invariant: bool = False

    def __post_init__(self) -> None:
        if self.method is not None:
            choice("method", self.method, METHODS)
        boolean("act_order", self.act_order)
        choice("clip", self.clip, CLIPS)
        if self.group_size is not None:
            object.__setattr__(self, "group_size", _group_size(self.group_size))
        if self.zeros is None:
            object.__setattr__(self, "zeros", self._usual_zeros())
        if self.bilevel is not None:
            object.__setattr__(self, "bilevel", Bilevel.read(self.bilevel))
        # The spec of the smallest weight checks format, table, zeros and scale, in the words that `compile` uses.
        least = lcm(self.group_size or MIN_K, SUM_COLUMNS if self.compute else 1)
        spec = self.spec(1, least * (self.bilevel.groups if self.bilevel else 1))
        object.__setattr__(self, "table", spec.table)
        self._check_numbers()
        if self.method is None:
            movable = self.zeros == "float" and not self.symmetric and self.dtype.kind in ("uint", "int")
            object.__setattr__(self, "method", "hqq" if movable else "rtn")
        self._check_method()
        self._check_data()

    def _usual_zeros(self) -> Zeros:
        if self.method in FLOAT_ZEROS:
            return "float"
        return "int" if isinstance(self.weight, str) and self.weight.startswith("u") else "none"

    def _check_numbers(self) -> None:
        boolean("symmetric", self.symmetric)
        if self.symmetric and self.zeros == "none":
            raise SpecError("symmetric=True needs zeros to keep in the middle; use zeros='int' or 'float', or drop it")
        if isinstance(self.damping, bool) or not isinstance(self.damping, float | int) or not 0 < self.damping <= 1:
            raise SpecError(f"damping={self.damping!r} must be a number above 0 and at most 1, such as 0.01")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise SpecError(f"steps={self.steps!r} must be a positive integer, such as 200")
        if isinstance(self.beams, bool) or not isinstance(self.beams, int) or not 1 <= self.beams <= MAX_BEAMS:
            raise SpecError(f"beams={self.beams!r} must be an integer in 1..{MAX_BEAMS}, such as 8")
        self._check_spqr_numbers()

    def _check_spqr_numbers(self) -> None:
        given: object = self.outlier_threshold
        if given is not None and (isinstance(given, bool) or not isinstance(given, float | int) or not given > 0):
            rule = "must be a number above 0, such as 0.2, or None for no outliers"
            raise SpecError(f"outlier_threshold={given!r} {rule}")
        for name, value, most in (("scale_bits", self.scale_bits, 8), ("scale_rows", self.scale_rows, 1 << 20)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise SpecError(f"{name}={value!r} must be an integer in 1..{most}")
        if self.act_order and self.method != "spqr":
            raise SpecError("act_order=True is SpQR's; GPTQ rounds in that order anyway, and needs no permutation")

    def _check_method(self) -> None:
        if self.beams > 1 and self.method not in BY_COLUMNS:
            raise SpecError(f"method={self.method!r} has no beams; use method='gptq' or 'spqr', or beams=1")
        if self.method in INTEGERS_ONLY and self.dtype.kind not in ("uint", "int"):
            rule = f"method={self.method!r} needs an integer weight (u1..u8, i1..i8)"
            raise SpecError(f"{rule}, not {self.weight!r}; use 'gptq' or 'rtn'")
        if self.method in FLOAT_ZEROS and (self.zeros != "float" or self.symmetric):
            given = "symmetric=True" if self.symmetric else f"zeros={self.zeros!r}"
            rule = f"method={self.method!r} optimizes float zeros and can't have {given}"
            raise SpecError(f"{rule}; use zeros='float', or 'gptq'")
        boolean("row_scales", self.row_scales)
        usual = self.scale_type == "e4m3" and self.zeros == "none" and self.method in ("rtn", "gptq")
        if self.row_scales and not usual:
            rule = "row_scales=True goes with scale='e4m3', zeros='none' and method='rtn' or 'gptq'"
            raise SpecError(f"{rule}, not with {self.scale_type!r}, {self.zeros!r} and {self.method!r}")
        if self.by_k_quant and self.method not in ("rtn", "gptq"):
            what = f"zeros={self.zeros!r}" if self.bilevel is None else "bilevel="
            raise SpecError(f"method={self.method!r} has no {what}; use method='rtn' or 'gptq'")
        level = self.bilevel
        plain = level is None or (level.rows == 1 and not (level.zeros or level.offsets or level.table))
        if level and not (plain and self.zeros in ("none", "offset")):
            rule = "bilevel= goes with zeros='none' or 'offset', rows=1 and no zeros, offsets or table of its own"
            raise SpecError(f"{rule}, not with zeros={self.zeros!r} and {self.bilevel}")
        if level and self.scale not in SCALE_CODES:
            allowed = ", ".join(map(repr, SCALE_CODES))
            raise SpecError(f"scale={self.scale!r} can't be quantized with bilevel=; use a format of codes: {allowed}")
        if self.method == "spqr" and self.scale_type not in ("f16", "f32"):
            raise SpecError(f"method='spqr' has scales in f16, not {self.scale_type}; use scale='f16'")

    def _check_data(self) -> None:
        if self.calibration is not None:
            choice("calibration", self.calibration, ("importance", "hessian"))
            if self.method != "rtn":
                rule = "is for method='rtn'; others look at all that they need"
                raise SpecError(f"calibration={self.calibration!r} {rule}: drop it, or use 'rtn'")
        if self.clip == "ocp" and self.scale_type != "e8m0":
            raise SpecError(f"clip='ocp' is a rule for scale='e8m0', not {self.scale_type!r}; use clip='max'")

    @property
    def needs_data(self) -> bool:
        """Whether quantizing needs inputs of the layer."""
        return self.method in CALIBRATED or self.calibration is not None

    @property
    def dtype(self) -> DType:
        """The element format."""
        return dtype(self.weight, self.table)

    @property
    def by_k_quant(self) -> bool:
        """Tells whether scales and offsets are chosen together (`k_quants.py`)."""
        return self.bilevel is not None or self.zeros == "offset"

    @property
    def second_level(self) -> Bilevel | None:
        """The second level of scales, zeros and offsets; None where these are stored as numbers.

        SpQR stores numbers for widths that kernels do not have, and for other numbers of rows than 16: a second level
        for each row would take more bytes than the numbers themselves.
        """
        if self.bilevel is not None:
            return self.bilevel
        coded = self.method == "spqr" and self.scale_rows == ROWS and f"u{self.scale_bits}" in SCALE_CODES
        if not coded or self.group_size is None or self.scale_type not in ("f16", "f32"):
            return None
        return Bilevel(ROWS, 1, self.scale_type, zeros=True)

    @property
    def scale_type(self) -> Scale:
        """The type of the scales; "f16" until it is known what they are multiplied in."""
        return self.scale or "f16"

    def multiplied_in(self, act: Act) -> QuantConfig:
        """Returns the configuration for a layer whose inputs have this type, with a type of scales."""
        if self.scale is not None:
            return self
        # The zeros of many bits need more digits than bf16 has, and have the type of the scales.
        exact = act == "f16" or self.zeros in ("float", "offset")
        return replace(self, scale="f16" if exact else "bf16")

    @property
    def quant_method(self) -> str:
        """Raises SpecError. transformers reads this of its own configurations only; it takes a `LowbitConfig`."""
        raise SpecError("transformers takes a LowbitConfig: quantization_config=lowbit.LowbitConfig(config)")

    def spec(self, n: int, k: int, **others: Any) -> MatmulSpec:
        """Returns the spec of a matmul with such a weight [n, k]; `others` are fields such as act, out, bias and
        epilogue.

        Raises SpecError if the weight cannot be cut into these groups.
        """
        zeros: Any = self.zeros
        scale: Any = self.multiplied_in(others.get("act", "f16")).scale_type
        usual = {f.name: getattr(self, f.name) for f in fields(self) if f.name in _OF_SPEC}
        usual["bilevel"] = self.second_level
        if self.method == "spqr":
            scale = f"u{self.scale_bits}" if self.second_level else scale
            usual |= {"outliers": self.outlier_threshold is not None, "permuted": self.act_order}
        return MatmulSpec(n, k, self.weight, self.group_size, zeros, scale, **{**usual, **others})

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration in terms of JSON."""
        return {"version": VERSION, **{f.name: in_json(getattr(self, f.name)) for f in fields(self)}}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> QuantConfig:
        """Returns the configuration that `to_dict` wrote. Raises SpecError for anything else."""
        if not isinstance(written, Mapping):
            raise SpecError(f"a configuration must be written as a dictionary, not {type(written).__name__}")
        values = dict(written)
        version = values.pop("version", None)
        if version != VERSION:
            raise SpecError(f"a configuration of version {version!r} can't be read, only {VERSION}; update lowbit")
        if unknown := sorted(map(repr, values.keys() - {f.name for f in fields(cls)})):
            raise SpecError(f"a configuration has no {', '.join(unknown)}; update lowbit, or drop it")
        return cls(**values)

    @classmethod
    def preset(cls, name: str) -> QuantConfig:
        """Returns a recipe by its name, such as "fp6_llm" (docs/quantizers.md). Raises SpecError for others."""
        return PRESETS[choice("preset", name, tuple(PRESETS))]


def usual_config(has_data: bool) -> QuantConfig:
    """Returns what is taken where no configuration is given: u4 in groups of 128, by rounding to nearest, or by GPTQ
    with calibration data. No method that takes at most three times GPTQ's time has less output error at equal bits
    (docs/quality.md)."""
    return QuantConfig(method="gptq" if has_data else "rtn")


def _group_size(given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < MIN_K:
        raise SpecError(f"group_size={given!r} must be an integer of at least {MIN_K}, or None for one scale per row")
    return given


def _of_gguf(name: str) -> QuantConfig:
    """Returns the recipe for a type of GGUF."""
    return QuantConfig(**PRESET_SPECS[name])


OF_GGUF = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs")

PRESETS: Mapping[str, QuantConfig] = {
    "fp6_llm": QuantConfig("f6e3m2", None, clip="max"),  # FP6-LLM: scale = max|w| / 28 for each row
    "nf4": QuantConfig("nf4", 64, clip="max"),  # QLoRA: scale = max|w| for each 64 weights
    "mxfp4": QuantConfig("f4e2m1", 32, scale="e8m0"),  # OCP MX; clip="ocp" has the scales of its examples
    "nvfp4": QuantConfig("f4e2m1", 16, scale="e4m3", row_scales=True),  # a factor per row, not one of the tensor
    "awq4": QuantConfig("u4", 128, method="awq"),
    "gptq4": QuantConfig("u4", 128, method="gptq"),
    "hqq4": QuantConfig("u4", 64, method="hqq"),
    "spqr": QuantConfig("u3", 16, method="spqr", act_order=True),  # Dettmers et al., 2023, with codes tried out
    "signround2": QuantConfig("u2", 64, method="signround"),
    **{name: _of_gguf(name) for name in OF_GGUF},
}
