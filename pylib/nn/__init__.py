"""Low-bit layers in models of torch.

`linear.py` has `LowbitLinear`; `quantize_model.py` has `lowbit.quantize_`, which decides what to quantize in `plan.py`,
looks at inputs in `observe.py`, and says what it did with the tables of `report.py`.
"""
