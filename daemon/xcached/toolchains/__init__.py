"""Tracks which toolchains are installed, and which entries are stale."""
