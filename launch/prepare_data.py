#!/usr/bin/env python3
"""This script is `zero-tp prepare`: see zero_tp/commands/prepare.py."""

from zero_tp.commands import start

if __name__ == "__main__":
    start("prepare")
