"""Print the path of a shipped file: a script for launchers, the corpus, or a config."""

from __future__ import annotations

import argparse

from zero_tp.base import shipped

PATHS = {
    "pretrain": "launch/pretrain.py",
    "finetune": "launch/finetune.py",
    "evaluate": "eval/zero_shot.py",
    "corpus": "launch/corpus/sotu.jsonl.gz",
    "configs": shipped.CONFIGS,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [*PATHS, *shipped.config_names()]
    parser.add_argument("name", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")


def main(options: argparse.Namespace) -> None:
    name = options.name
    print(shipped.shipped_path(PATHS[name]) if name in PATHS else shipped.find_config(name))
