"""How fast a model of transformers is with low-bit layers: `lowbit bench-model`.

`shapes.py` knows the sizes of models by name, `random_model.py` makes them with random weights, packed where they are
needed, `runner.py` compiles and times a step, `measure.py` goes through formats and steps, and `split.py` says what the
time goes to.
"""
