"""fbgemm_fp8, in which Meta published Llama 3.1 405B (transformers/integrations/fbgemm_fp8.py).

    weight           e4m3 [n, k]
    weight_scale     f32 [n, 1]
    input_scale_ub   f32 [1]   a bound of the scales of inputs, which stay in f16 or bf16 here

w = code * scale.
"""

from __future__ import annotations

from lowbit.pylib.checkpoints.formats import fp8
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors


def read(module: ModuleTensors) -> Imported:
    module.check_has("weight_scale")
    return fp8.read(module)


FORMAT = Format((".weight_scale",), (".weight", ".bias", ".input_scale_ub"), read, {})
