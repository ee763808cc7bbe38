"""GGUF files, as llama.cpp reads and writes them.

`container.py` reads the header, `blocks.py` and `super_blocks.py` say what the bytes of each type mean, `file.py` has
`lowbit.load_gguf`, and `architectures.py` says what the model is in transformers' terms.
"""
