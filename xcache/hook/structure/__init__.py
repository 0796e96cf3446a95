"""The structure of what jax is about to lower: a digest that is equal only if lowering gives the same program."""
