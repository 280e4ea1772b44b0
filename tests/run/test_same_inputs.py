"""Ranks that read another config, corpus, tokenizer or task file are refused before the run
starts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.support.checkpoint_runs import SEQUENCE, VOCABULARY, write_config
from tests.support.pools import Pools
from tests.support.tiny_models import write_corpus
from zero_tp.base.errors import UserError
from zero_tp.parallel.agreement import require_same_on_all_ranks
from zero_tp.run.config import RunConfig
from zero_tp.run.run_inputs import RunInputs


def read_own_inputs(path: str, folders: list[str], last_ranks_change: str = "") -> str:
    """Read the run's inputs, each rank in a folder of its own; return the error."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    changes = [last_ranks_change] if is_last and last_ranks_change else []
    config = RunConfig.load(path, changes, dist.get_world_size())
    with contextlib.chdir(folders[dist.get_rank()]):
        try:
            read = RunInputs(config, Path("RUN"), hash_tokens=dist.get_rank() == 0).fingerprints()
            require_same_on_all_ranks(
                {f"the ranks do not read the same {what}": it for what, it in read.items()}
            )
        except UserError as error:
            return str(error)
    return ""


def full_disk() -> str:
    """Return the error of every rank when rank 0's disk is full: the system names no file then."""
    from zero_tp.base.errors import UserError
    from zero_tp.parallel.agreement import on_rank_zero

    def write() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError) as raised:
        on_rank_zero(write)
    return str(raised.value)


def test_a_full_disk_of_rank_zero_ends_every_rank(ranks: Pools) -> None:
    assert (
        ranks(2).run(full_disk)
        == ["No space left on device; check its permissions and the free space"] * 2
    )


def reverse_corpus(folder: Path) -> None:
    data = folder / "train.bin"
    data.write_bytes(data.read_bytes()[::-1])


DIFFERENCES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "config": (
        lambda _: None,
        r"config: zero_tp\.training\.steps: 4 on rank 0 \(.*; 5 on rank 1 \(",
    ),
    "corpus": (reverse_corpus, r"corpus nowhere/train: SHA-256 .*… on rank 0 \(.*… on rank 1 \("),
    "no tokenizer": (
        lambda folder: shutil.rmtree(folder / "tokenizer"),
        r"tokenizer: nowhere/tokenizer on rank 0 \(.*; nothing on rank 1 \(",
    ),
    "tokenizer": (
        lambda folder: (folder / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}"),
        r"tokenizer nowhere/tokenizer: SHA-256 .*… on rank 1 \(",
    ),
    "task": (
        lambda folder: (folder / "a.txt").write_text("other"),
        r"file of the task perplexity: SHA-256 ",
    ),
}


@pytest.mark.parametrize("difference", [None, *DIFFERENCES])
def test_ranks_agree_on_what_they_read(
    ranks: Pools, tmp_path: Path, difference: str | None
) -> None:
    path, one = write_config(tmp_path / "run.json", 1, "fp32", 1), tmp_path / "one" / "nowhere"
    write_corpus(one / "train", [np.arange(3 * SEQUENCE) % VOCABULARY], VOCABULARY)
    tokenizer = Tokenizer(WordLevel({"<end>": 0, "<unknown>": 1}, unk_token="<unknown>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(
        one / "tokenizer"
    )
    (one / "a.txt").write_text("text")
    config = json.loads(path.read_text())
    config["zero_tp"]["evaluation"] = {
        "tasks": ["perplexity"],
        "task_data": {"perplexity": "nowhere/a.txt"},
    }
    path.write_text(json.dumps(config))
    other = Path(shutil.copytree(one.parent, tmp_path / "other"))
    change, words = DIFFERENCES.get(difference or "", (lambda _: None, ""))
    change(other / "nowhere")
    option = "zero_tp.training.steps=5" if difference == "config" else ""
    for error in ranks(2).run(read_own_inputs, str(path), [str(one.parent), str(other)], option):
        assert (
            re.match(f"the ranks do not read the same {words}", error) if difference else not error
        ), error
