"""The number of the store's schema, ``PRAGMA user_version``: the daemon writes it, and the command line reads it."""

SCHEMA_VERSION = 10
