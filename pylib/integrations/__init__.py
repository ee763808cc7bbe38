"""lowbit inside other libraries: transformers, PEFT and vLLM.

`config.py` has `LowbitConfig`; `quantizer.py` says what `from_pretrained` does with it, through the hooks that
transformers has for quantizers; `gguf.py` builds the models of GGUF files; `lora.py` has the layer that PEFT puts
around a low-bit one; `vllm/` serves models. They import these libraries. So lowbit imports them only after those
(`lowbit/lazily.py`), and vLLM finds what it needs by an entry point.
"""

QUANT_METHOD = "lowbit"
"""The name of lowbit's quantization in config.json."""
