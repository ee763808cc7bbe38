"""lowbit inside SGLang: it serves a folder with low-bit weights, or quantizes a dense model when it has been loaded.

SGLang calls `register`, an entry point of the group `sglang.srt.plugins`, in each of its processes. `config.py` has the
class that SGLang asks which layers are low-bit, `methods.py` what such a layer does. What it shares with other servers'
plugins is in `integrations/serving/`.
"""

from importlib import import_module


def register() -> None:
    """Makes `quantization="lowbit"` known to SGLang. May be called several times."""
    import_module("lowbit.pylib.integrations.sglang.config")
