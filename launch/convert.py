#!/usr/bin/env python3
"""This script is `zero-tp convert`: see zero_tp/commands/convert.py."""

from zero_tp.commands import start

if __name__ == "__main__":
    start("convert")
