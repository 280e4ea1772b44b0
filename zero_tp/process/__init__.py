"""A rank's process has launchers, connections, signals, output and an end."""
