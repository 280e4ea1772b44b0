"""Write and read safetensors files."""
