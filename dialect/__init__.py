"""What the IR can say: formats, packing, layouts, types and operations. It knows no torch and no CUDA."""

from lowbit.aliases import alias

alias(__name__)
