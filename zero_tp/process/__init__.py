"""The process of one rank: launchers, signals, connections, output."""
