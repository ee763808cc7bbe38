"""Models in files: lowbit's own checkpoints, and those of other libraries, which are imported without loss.

`model.py` saves models and loads them, `checkpoint.py` opens a folder, `tensor_files.py` reads safetensors lazily. Each
file of `formats/` says what the tensors of one library mean, and gives an `Imported` (`imported.py`): codes, scales and
zeros as `pack` takes them. `registry.py` knows the formats by the names in a model's config.json.

A checkpoint may come from anywhere: nothing in it is executed, there is no pickle, and sizes are compared before memory
is taken.
"""
