"""Check a config's keys and the combinations of keys, at every entry point."""
