"""The typed sections of a run's config, and the types of DeepSpeed's keys; without torch and
DeepSpeed.
"""
