from typing import Any

class FusedMoEActivationFormat:
    Standard: Any
    BatchedExperts: Any

class FusedMoEExpertsModular:
    def __init__(
        self, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None, num_dispatchers: int | None = None
    ) -> None: ...

class FusedMoEKernel:
    def __init__(self, prepare_finalize: Any, fused_experts: Any) -> None: ...
