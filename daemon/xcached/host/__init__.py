"""The daemon's own process: its settings, log, service manager, and the folders it watches."""
