"""What stands between the matmuls of a transformer layer when it decodes: norms, rotation and cache, and attention."""
