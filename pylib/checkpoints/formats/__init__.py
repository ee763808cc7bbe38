"""What the tensors of other libraries mean, one file for each format.

Each has a FORMAT: the names of a quantized module's tensors, and a function that reads them.
"""
