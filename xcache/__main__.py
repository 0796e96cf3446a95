"""``python -m xcache``, for when the script is not on the path."""

from xcache.cli import main

main(prog_name="xcache")
