"""Skip tracing: a call of a function that ``xcache.jit`` made is answered from a record of an earlier process.

``dispatch`` answers the calls, ``description`` makes the digest that finds a record, and ``records`` writes and reads
what is in it.
"""
