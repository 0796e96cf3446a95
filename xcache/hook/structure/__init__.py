"""The structure of what jax is about to lower: a digest that is equal only if lowering gives the same program.

``digest`` makes it, with the table of types in ``encoding``. ``values``, ``placement``, ``jaxprs``, ``code``,
``primitives`` and ``objects`` fill the table, each for its types; ``locations`` adds where kernels were written.
``callables`` describes a callable by a text, and ``rules`` reads jax's tables of lowering rules. ``ambient`` and
``patches`` cover what lowering reads besides the program.
"""
