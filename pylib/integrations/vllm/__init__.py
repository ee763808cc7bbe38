"""lowbit inside vLLM: `vllm serve DIR` runs a folder with low-bit weights, or quantizes a dense one while it is loaded.

vLLM calls `register`, an entry point of the group `vllm.general_plugins`, in each of its processes. `config.py` has the
class that vLLM asks which layers are low-bit, `methods.py` and `expert_methods.py` what such a layer does. What it
shares with other servers' plugins is in `integrations/serving/`.
"""

from importlib import import_module


def register() -> None:
    """Makes `quantization="lowbit"` known to vLLM. May be called several times."""
    import_module("lowbit.pylib.integrations.vllm.config")
