#!/usr/bin/env python3
"""This script is `zero-tp plan`: see zero_tp/commands/plan.py."""

from zero_tp.commands import start

if __name__ == "__main__":
    start("plan")
