"""A weight in torch: packed as kernels read it, unpacked, saved, cut, and as numbers again."""
