"""The daemon's end of the socket: the listener, sessions with clients and their turns, and the lock."""
