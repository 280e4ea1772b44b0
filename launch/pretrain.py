#!/usr/bin/env python3
"""This script is `zero-tp pretrain`: `start` of zero_tp/commands/__init__.py, which calls that of
zero_tp/commands/pretrain.py.
"""

from zero_tp.commands import start

if __name__ == "__main__":
    start("pretrain")
