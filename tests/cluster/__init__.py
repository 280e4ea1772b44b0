"""A cluster on one machine: its nodes are namespaces of the kernel. `pytest -m cluster` runs
these tests, as root.
"""
