"""Compile programs before they are wanted: each in a process of its own, several at once, here or on a Dask cluster."""
