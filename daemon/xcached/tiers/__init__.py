"""Stores beyond this machine that daemons share: object stores, folders, Redis, HTTP caches."""
