"""The life of one rank's process: launcher, connections, signals, watchdog, output and exit."""
