"""What kernels share: launches, layouts, tiles, copies."""
