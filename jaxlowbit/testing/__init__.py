"""What tests and benchmarks of low-bit products need, shipped so that users can check their own kernels and
models.

- ``reference``: float64 NumPy values of quantized arrays and of their products.
- ``tolerance``: error bounds derived from the number of terms, the dtypes and the formats.
- ``shapes``: named problem shapes, tagged by model, and the edge shapes of a tile.
- ``bench``: ``python -m jaxlowbit bench``.
"""
