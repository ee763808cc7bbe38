from sglang.srt.layers.quantization.base_config import QuantizationConfig

QUANTIZATION_METHODS: dict[str, type[QuantizationConfig]]
