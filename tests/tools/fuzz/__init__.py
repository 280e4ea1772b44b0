"""Fuzzers: inputs are damaged at random, and a command has to refuse them in one line or to be
right.
"""
