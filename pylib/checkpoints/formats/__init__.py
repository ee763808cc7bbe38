"""Readers of the tensors of other libraries, one file for each format.

Each has a FORMAT: the names of a quantized module's tensors, and a function that reads them.
"""
