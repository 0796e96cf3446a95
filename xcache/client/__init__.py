"""The program's end of the socket: ask the daemon, start it, and do without it."""
