"""The scripts of docs/python.md do what the page says, alone and as ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support.launched import free_port, launch, run
from tests.support.python_example import PAGE, SCRIPT, TUNE

(DEEPSPEED,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
(OUTPUT,) = re.findall(r"```\n(step .*?)\n```", PAGE, re.DOTALL)


def losses_and_sentence(output: str) -> tuple[dict[int, float], str]:
    losses = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)", output, re.MULTILINE)}
    return losses, output.splitlines()[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_script_trains_the_same_model_and_transformers_says_its_sentence(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "tiny_llama.py").write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(free_port())]
    done = run([sys.executable, *(launcher if ranks > 1 else []), "tiny_llama.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    losses, sentence = losses_and_sentence(done.stdout)
    written, said = losses_and_sentence(OUTPUT)
    assert losses.keys() == written.keys() and sentence == said
    # Rounding grows with every step: the page's figures at step 40 and later are not those of every machine.
    assert losses[20] == pytest.approx(written[20], abs=1e-3)
    assert (tmp_path / "exports" / "tiny_llama" / "model.safetensors").exists()


@pytest.mark.thorough
def test_the_trainer_script_trains_as_plain_trainer_does(tmp_path: Path) -> None:
    """On TP 2 beside transformers' own Trainer in one process, whose script differs in three lines."""
    texts = [f"{number} times {number} is {number * number}, and nobody doubts it." for number in range(400)]
    trained = run_script(tmp_path, TUNE, texts, launch(2, script=str(tmp_path / "tune.py")))
    plain = TUNE.replace("from zero_tp import ZeroTPTrainer", "from transformers import Trainer as ZeroTPTrainer")
    plain = plain.replace('    deepspeed="ds.json",\n', "").replace("    tensor_parallel=2,\n", "")
    expected = run_script(tmp_path, plain, texts, [sys.executable, "tune.py"])
    assert len(trained) == 4 and trained[-1] < trained[0]
    assert trained == pytest.approx(expected, abs=2e-4), "the log rounds to four digits"


def run_script(folder: Path, script: str, texts: list[str], command: list[str]) -> list[float]:
    """Run the Trainer's script on a small model, check that its export opens, and return the losses it printed."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    (folder / "text.txt").write_text("\n".join(texts))
    (folder / "ds.json").write_text(DEEPSPEED)
    (folder / "tune.py").write_text(script)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=300, show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, model_max_length=128).save_pretrained(
        folder / "exports/quickstart"
    )
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(5)
    LlamaForCausalLM(config).save_pretrained(folder / "exports/quickstart")
    done = run(command, folder)
    assert done.returncode == 0, done.stderr
    assert not re.findall(r"is deprecated|DeepSpeed's config:|Token indices", done.stdout + done.stderr), (
        "no library warns at a step"
    )
    AutoModelForCausalLM.from_pretrained(folder / "exports/tuned")
    return [float(loss) for loss in re.findall(r"'loss': '?([\d.e+-]+)", done.stdout)]
