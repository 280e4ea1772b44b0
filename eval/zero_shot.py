#!/usr/bin/env python3
"""This script is `zero-tp evaluate`: see zero_tp/commands/evaluate.py."""

from zero_tp.commands import start

if __name__ == "__main__":
    start("evaluate")
