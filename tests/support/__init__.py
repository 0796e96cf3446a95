"""Helpers of the tests: places, daemons, conversations, programs and faults."""
