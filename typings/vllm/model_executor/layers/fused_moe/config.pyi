from typing import Any

FUSED_MOE_UNQUANTIZED_CONFIG: Any
