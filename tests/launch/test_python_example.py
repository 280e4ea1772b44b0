"""The scripts of examples/ do what the pages say, alone and as ranks, and the pages show them."""

from __future__ import annotations

import re
import shutil
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

from tests.support.launched import ROOT, free_port, launch, run

EXAMPLES = ROOT / "examples"
PAGES = {
    "python.md": ["tiny_llama.py", "stop_early.py", "tune.py", "ds.json"],
    "architecture.md": ["layer_norm_1p.py"],
}
"""Page → the examples that it shows; tests/model/test_new_part.py runs that of architecture.md."""
TUNE = (EXAMPLES / "tune.py").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_the_examples_as_they_are(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    shown = re.findall(r"```(?:python|json)\n(.*?)```", text, re.DOTALL)
    assert shown == [(EXAMPLES / name).read_text() for name in PAGES[page]]
    assert not [name for name in PAGES[page] if f"(../examples/{name})" not in text]


def test_every_example_is_on_a_page() -> None:
    files = [path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".json")]
    assert sorted(path.name for path in files) == sorted(chain.from_iterable(PAGES.values()))


def losses_and_sentence(output: str) -> tuple[dict[int, float], str]:
    losses = {
        int(step): float(loss)
        for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)", output, re.MULTILINE)
    }
    return losses, output.splitlines()[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_script_trains_the_same_model_and_transformers_says_its_sentence(
    ranks: int, tmp_path: Path
) -> None:
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(ranks),
        "--master_port",
        str(free_port()),
    ]
    done = run(
        [sys.executable, *(launcher if ranks > 1 else []), str(EXAMPLES / "tiny_llama.py")],
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    losses, sentence = losses_and_sentence(done.stdout)
    (output,) = re.findall(
        r"```\n(step .*?)\n```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL
    )
    written, said = losses_and_sentence(output)
    assert losses.keys() == written.keys() and sentence == said
    # Rounding grows with every step: the page's figures at step 40 and later are not those of every
    # machine.
    assert losses[20] == pytest.approx(written[20], abs=1e-3)
    assert (tmp_path / "exports" / "tiny_llama" / "model.safetensors").exists()


@pytest.mark.thorough
def test_the_trainer_script_trains_as_plain_trainer_does(tmp_path: Path) -> None:
    """On TP 2 beside transformers' own Trainer in one process, whose script differs in three
    lines.
    """
    texts = [
        f"{number} times {number} is {number * number}, and nobody doubts it."
        for number in range(400)
    ]
    trained = run_script(tmp_path, TUNE, texts, launch(2, script=str(tmp_path / "tune.py")))
    plain = TUNE.replace(
        "from zero_tp import ZeroTPTrainer", "from transformers import Trainer as ZeroTPTrainer"
    )
    plain = plain.replace('    deepspeed="ds.json",\n', "").replace("    tensor_parallel=2,\n", "")
    expected = run_script(tmp_path, plain, texts, [sys.executable, "tune.py"])
    assert len(trained) == 4 and trained[-1] < trained[0]
    assert trained == pytest.approx(expected, abs=2e-4), "the log rounds to four digits"


def run_script(folder: Path, script: str, texts: list[str], command: list[str]) -> list[float]:
    """Run the Trainer's script on a small model, check that its export opens, and return the
    losses it printed.
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers import (
        AutoModelForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    (folder / "text.txt").write_text("\n".join(texts))
    shutil.copy(EXAMPLES / "ds.json", folder)
    (folder / "tune.py").write_text(script)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=300, show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, model_max_length=128).save_pretrained(
        folder / "exports/quickstart"
    )
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(5)
    LlamaForCausalLM(config).save_pretrained(folder / "exports/quickstart")
    done = run(command, folder)
    assert done.returncode == 0, done.stderr
    assert not re.findall(
        r"is deprecated|DeepSpeed's config:|Token indices", done.stdout + done.stderr
    ), "no library warns at a step"
    AutoModelForCausalLM.from_pretrained(folder / "exports/tuned")
    return [float(loss) for loss in re.findall(r"'loss': '?([\d.e+-]+)", done.stdout)]
