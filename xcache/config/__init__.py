"""The settings: the table that defines them, and their values in this process."""
