"""The structure of what jax is about to lower: a digest that is equal only if lowering gives the same program.

``digest`` makes it, with the table of types in ``encoding``. ``values``, ``placement``, ``jaxprs``, ``code`` and
``objects`` fill the table, each for its types; ``locations`` adds where kernels were written.
``description`` describes jax's code by content, ``reach`` follows what it reads, ``pristine`` keeps that, and ``marks``
notices changes; ``libraries`` tells jax's code from a program's. ``ambient`` covers what lowering reads besides.
"""
