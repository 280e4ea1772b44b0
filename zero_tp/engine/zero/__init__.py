"""DeepSpeed's ZeRO engines, and everything that depends on DeepSpeed's internals."""
