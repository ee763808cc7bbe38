"""lowbit: a compiler for low-bit matrix multiplication.

    spec = lowbit.MatmulSpec(n=8192, k=8192, weight="u4", group_size=128)
    mm = lowbit.compile(spec)
    w = mm.pack(codes, scales)
    y = mm(x, w)

The package is made of three folders, which are links here: `lowbit.dialect` (what the IR can say), `lowbit.passes` (how
it is lowered) and `lowbit.pylib` (what a user calls). The names of `lowbit.pylib` are also those of `lowbit`.

transformers and PEFT know lowbit once it and they are imported, in either order; `lazily.py` says how.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowbit.lazily import when_imported

if TYPE_CHECKING:
    from lowbit.pylib import *  # noqa: F403


_PACKAGES = ("dialect", "passes", "pylib")


def __getattr__(name: str) -> Any:
    return getattr(import_module("lowbit.pylib"), name)


def __dir__() -> list[str]:
    return sorted({*_PACKAGES, *import_module("lowbit.pylib").__all__, *filter(_is_special, globals())})


def _is_special(name: str) -> bool:
    return name.startswith("__")


when_imported(
    "transformers.configuration_utils", lambda: import_module("lowbit.pylib.integrations.notice").leave_notices()
)
when_imported("transformers.quantizers.auto", lambda: import_module("lowbit.pylib.integrations.quantizer"))
when_imported("peft.tuners.lora.model", lambda: import_module("lowbit.pylib.integrations.lora"))
