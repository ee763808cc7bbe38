"""Quantizers: from a float weight to codes, scales and zeros that `pack` takes.

`config.py` says what to make of a weight, `api.py` has `lowbit.quantize`. Each method is a file: `rtn.py`, `hqq.py`,
`gptq.py`, `awq.py`, `signround.py`, `spqr.py`. They share `grid.py`: which numbers a format, a scale and a zero can
stand for, and `group_fit.py`, the scales and offsets that fit groups best. GPTQ and SpQR round columns by `beams.py`.
"""
