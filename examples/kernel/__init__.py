"""A matmul kernel for a 4-bit weight, written in five steps; docs/kernel.md explains them.

    python -m examples.kernel

checks every step against float64, in the emulator or on the GPU, and times it on the GPU.
"""
