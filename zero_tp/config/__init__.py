"""RunConfig: the typed, validated view of one JSON file."""
