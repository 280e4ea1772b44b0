"""Print the JSON schema of the config file. An editor completes and checks a config that names it:

%(prog)s > zero_tp.schema.json          and in the config: "$schema": "zero_tp.schema.json"
"""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def main(options: argparse.Namespace) -> None:
    from zero_tp.run.config.json_schema import json_schema

    print(json.dumps(json_schema(), indent=1))
