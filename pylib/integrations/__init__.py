"""lowbit inside other libraries: transformers and PEFT.

`config.py` has `LowbitConfig`; `quantizer.py` says what `from_pretrained` does with it, through the hooks that
transformers has for quantizers. Both import transformers, so lowbit imports them only after it: `lowbit/lazily.py`.
"""
