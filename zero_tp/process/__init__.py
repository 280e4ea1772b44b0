"""A rank's process: its launchers, connections, signals, output and end."""
