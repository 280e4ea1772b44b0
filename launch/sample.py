#!/usr/bin/env python3
"""This script is `zero-tp sample`: see zero_tp/commands/sample.py."""

from zero_tp.commands import start

if __name__ == "__main__":
    start("sample")
