"""Programs that try the library and its tests; pytest does not run them."""
