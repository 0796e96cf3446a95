"""The store: rows and files, read by one thread and written by another, within limits."""
