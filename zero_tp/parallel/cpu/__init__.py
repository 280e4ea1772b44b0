"""What only makes CPUs faster: the heap of a process, and a reduce-scatter over gloo."""
