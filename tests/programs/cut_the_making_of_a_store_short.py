"""Make a store in one child for each statement that writes; the child ends, as if killed, before it is carried out."""

import os
import sqlite3
import sys
from pathlib import Path

import sqlite_utils  # noqa: F401  # loaded once, not in every child

from xcached.store.store import Store

# After one of these the files are as they were before it.
WRITES_NOTHING = ("select", "savepoint", "release", "pragma table_info")
connect = sqlite3.connect


def connect_and_count(*arguments, **options):
    connection = connect(*arguments, **options)

    def trace(statement):
        global left
        left -= not statement.lower().startswith(WRITES_NOTHING)
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
