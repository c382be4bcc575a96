"""Kernels, one file per family: a plain torch reference, then the backends."""
