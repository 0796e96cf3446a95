"""The requests: each one's meaning, on the serving thread."""
