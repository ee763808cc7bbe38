from collections.abc import Callable, Sequence
from typing import Any

from torch_mlir import ir

class PatternRewriter:
    @property
    def ip(self) -> ir.InsertionPoint: ...
    def erase_op(self, op: ir.Operation | ir.OpView) -> None: ...
    def replace_op(
        self, op: ir.Operation | ir.OpView, new_op: ir.Operation | ir.OpView | Sequence[ir.Value]
    ) -> None: ...

class ConversionPatternRewriter(PatternRewriter):
    def convert_region_types(self, region: ir.Region, converter: TypeConverter, /) -> None: ...

class TypeConverter:
    def add_conversion(self, convert: Callable[[Any], ir.Type | None]) -> None: ...
    def convert_type(self, type: ir.Type) -> ir.Type | None: ...

class FrozenRewritePatternSet: ...

class RewritePatternSet:
    def __init__(self, context: ir.Context | None = ...) -> None: ...
    def add(
        self, root: type[Any] | str, fn: Callable[[Any, PatternRewriter], Any], benefit: int = ...
    ) -> None: ...
    def add_conversion(
        self,
        root: type[Any] | str,
        fn: Callable[[Any, Any, TypeConverter, ConversionPatternRewriter], Any],
        type_converter: TypeConverter,
        benefit: int = ...,
    ) -> None: ...
    def freeze(self) -> FrozenRewritePatternSet: ...

class ConversionTarget:
    def __init__(self, context: ir.Context | None = ...) -> None: ...
    def add_legal_dialect(self, *dialects: Any) -> None: ...
    def add_illegal_dialect(self, *dialects: Any) -> None: ...
    def add_legal_op(self, *ops: Any) -> None: ...
    def add_illegal_op(self, *ops: Any) -> None: ...

class ConversionConfig:
    build_materializations: bool
    folding_mode: Any

class GreedyRewriteConfig:
    enable_constant_cse: bool
    enable_folding: bool
    max_iterations: int
    max_num_rewrites: int
    use_top_down_traversal: bool
    region_simplification_level: Any
    strictness: Any

def apply_partial_conversion(
    op: ir.Operation | ir.OpView,
    target: ConversionTarget,
    set: FrozenRewritePatternSet,
    config: ConversionConfig | None = ...,
) -> None: ...
def apply_full_conversion(
    op: ir.Operation | ir.OpView,
    target: ConversionTarget,
    set: FrozenRewritePatternSet,
    config: ConversionConfig | None = ...,
) -> None: ...
def apply_patterns_and_fold_greedily(
    op: ir.Module | ir.Operation | ir.OpView,
    set: FrozenRewritePatternSet,
    config: GreedyRewriteConfig | None = ...,
) -> None: ...
def walk_and_apply_patterns(op: ir.Operation | ir.OpView, set: FrozenRewritePatternSet) -> None: ...
