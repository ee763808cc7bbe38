from typing import Any

def maybe_make_prepare_finalize(
    moe: Any, quant_config: Any, routing_tables: Any = None, allow_new_interface: bool = False
) -> Any: ...
