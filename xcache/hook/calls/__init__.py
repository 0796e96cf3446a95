"""Skip tracing: a call of a function that ``xcache.jit`` made is answered from a record of an earlier process.

``jit`` is what the program calls; ``version_of`` makes a version. ``dispatch`` answers the calls, ``description`` makes
the digest that finds a record, with ``program_values`` for the program's own values. ``record_format`` and ``trees``
write and read what is in a record, and ``second_trace`` says whether there may be one.
"""
