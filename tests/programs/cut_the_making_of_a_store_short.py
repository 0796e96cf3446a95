"""Make a store in one child for each statement of SQL; the child ends, as if killed, before SQLite carries it out."""

import os
import sqlite3
import sys
from pathlib import Path

import sqlite_utils  # noqa: F401  # loaded once, not in every child

from xcached.store.store import Store

connect = sqlite3.connect


def connect_and_count(*arguments, **options):
    connection = connect(*arguments, **options)

    def trace(statement):
        global left
        left -= 1
        if left < 0:
            os._exit(9)

    connection.set_trace_callback(trace)
    return connection


sqlite3.connect = connect_and_count

for number in range(1000):
    directory = Path(sys.argv[1]) / str(number)
    directory.mkdir()
    if (child := os.fork()) == 0:
        left = number
        Store(directory)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
print(number)
