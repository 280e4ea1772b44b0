#!/usr/bin/env python3
"""This script is `zero-tp finetune`: see zero_tp/commands/finetune.py."""

from zero_tp.commands import start

if __name__ == "__main__":
    start("finetune")
