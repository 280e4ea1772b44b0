"""The papers' results, measured in small and planned at full size."""
