"""Look at what was compiled, with the jaxlib that compiled it, in a process of its own."""
