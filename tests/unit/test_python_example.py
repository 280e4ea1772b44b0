"""The script of docs/python.md does what the page says, alone and as ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.launched import ROOT, free_port, run

PAGE = (ROOT / "docs" / "python.md").read_text()
SCRIPT, CALLBACKS, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
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
