"""A name on the Hugging Face hub where a directory is asked for: from a cache laid by hand, and
from a server.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from tests.support.tiny_models import tiny_gpt2
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.base.weight_files import (
    find_weights,
    is_cached,
    is_hub_name,
    pin_commit,
    pin_to_first_start,
)

NAME, COMMIT = "somebody/tiny", "0123456789abcdef0123456789abcdef01234567"
TEXTS = ["the cat sat on the mat and looked at the moon"] * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gpt2(tmp_path_factory.mktemp("model"), TEXTS)


@pytest.fixture
def cache(model: Path, tmp_path: Path) -> Path:
    """A cache of huggingface_hub, as its documentation describes it."""
    repository = tmp_path / "home" / "hub" / "models--somebody--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    return tmp_path / "home"


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-m", "zero_tp", *words], env=given, capture_output=True, text=True
    )


def write_config(path: Path, **others: Any) -> None:
    """Write a run's config that begins with the model on the hub, with other keys of the block."""
    data = {"train": "corpus/train", "sequence_length": 16}
    block = {"model": {"from_pretrained": NAME}, "data": data, "training": {"steps": 1}, **others}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    path.write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_tp": block})
    )


def test_a_path_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert (
        is_hub_name("somebody/tiny")
        and is_hub_name("somebody/tiny@v1.0")
        and is_hub_name("somebody/tiny@refs/pr/1")
    )
    for path in (
        "tiny",
        "runs/tiny",
        "./somebody/tiny",
        "/somebody/tiny",
        "a/b/c",
        "somebody/",
        "bpe:8192",
        "",
    ):
        assert not is_hub_name(path), path


def test_a_run_that_goes_on_keeps_its_commit() -> None:
    """Without asking anybody."""
    before = f"{NAME}@{COMMIT}"
    assert (
        pin_to_first_start(NAME, before)
        == pin_to_first_start(before, None)
        == pin_commit(before, "key")
        == before
    )
    for other in ("a/directory/of/mine", "somebody/else", f"{NAME}@v2", 7):
        assert pin_to_first_start(other, before) == other
    assert pin_commit("a/directory/of/mine", "key") == "a/directory/of/mine"


@pytest.mark.parametrize("sharded", [False, True])
def test_a_cache_has_all_files_or_not_the_model(
    cache: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    """huggingface_hub returns the directory of a commit once it has fetched any file of it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache / "hub"))
    snapshot = cache / "hub" / "models--somebody--tiny" / "snapshots" / COMMIT
    weights = snapshot / "model.safetensors"
    if sharded:
        weights = weights.rename(snapshot / "model-00001-of-00001.safetensors")
        index = {"weight_map": {"transformer.wte.weight": weights.name}}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert is_cached(NAME, weights=True) and is_cached(f"{NAME}@{COMMIT}", weights=False)
    weights.unlink()
    assert not is_cached(NAME, weights=True) and is_cached(NAME, weights=False)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (snapshot / file).unlink(missing_ok=True)
    assert not is_cached(NAME, weights=False) and not is_cached("somebody/else", weights=False)


@pytest.mark.parametrize("refused", ["pickled", "adapter", "two models"])
def test_weights_that_are_refused_by_name_are_in_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Else `zero-tp check` would call them absent, and skip the refusal."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache / "hub"))
    snapshot = cache / "hub" / "models--somebody--tiny" / "snapshots" / COMMIT
    weights = snapshot / "model.safetensors"
    if refused == "pickled":
        weights.rename(snapshot / "pytorch_model.bin")
    elif refused == "adapter":
        weights.rename(snapshot / "adapter_config.json")
    else:
        (snapshot / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
        )
    assert is_cached(NAME, weights=True)
    with pytest.raises(UserError):
        find_weights(snapshot)


@THOROUGH
def test_a_cache_serves_without_a_network(model: Path, cache: Path) -> None:
    words = ("sample", "--prompt", "the cat", "--tokens", "5", "--temperature", "0", "--model")
    there = run(*words, NAME, HF_HOME=str(cache), HF_HUB_OFFLINE="1")
    assert (there.returncode, there.stderr) == (0, "")
    assert there.stdout == run(*words, str(model)).stdout
    missing = run(*words, "somebody/else@v2", HF_HOME=str(cache), HF_HUB_OFFLINE="1")
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1
    for part in ("no directory somebody/else@v2", "hf download somebody/else --revision v2"):
        assert part in missing.stderr


@THOROUGH
def test_the_model_in_python_and_in_a_config(model: Path, cache: Path, tmp_path: Path) -> None:
    """From the cache, without a network. In the config the name stands with its commit, of the
    model and of the tokenizer; exports take such a name too.
    """
    script = (
        "from pathlib import Path; from zero_tp.base.weight_files import resolve_tokenizer;"
        "from zero_tp import ZeroTPForCausalLM; from zero_tp.config import RunConfig;"
        f"print(ZeroTPForCausalLM.from_pretrained('{NAME}').num_parameters());"
        "config = RunConfig.load('config.json'); print(config.zero_tp.tokenizer, *map(str, "
        "config.missing_files()));"
        "block = config.with_pinned_tokenizer().resolved()['zero_tp'];"
        "print(block['model']['from_pretrained'], block['tokenizer']);"
        f"print(resolve_tokenizer(None, block['tokenizer']), resolve_tokenizer(Path('{NAME}'), "
        "None));"
        "RunConfig.load('config.json', ['zero_tp.model.from_pretrained=somebody/else@v2'])"
    )
    write_config(tmp_path / "config.json", tokenizer=NAME)
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1
    refusal = found.stderr.splitlines()[-1]
    for part in ("no directory somebody/else@v2", "hf download somebody/else --revision v2"):
        assert part in refusal
    parameters, written, *absent, name, tokenizer, recorded, given = found.stdout.split()
    assert (written, tokenizer) == (NAME, name) and absent == [
        "corpus/train.bin",
        "corpus/train.idx",
    ]
    assert recorded == given == str(cache / "hub" / "models--somebody--tiny" / "snapshots" / COMMIT)
    from transformers import AutoModelForCausalLM

    assert int(parameters) == AutoModelForCausalLM.from_pretrained(model).num_parameters()
    assert name == f"{NAME}@{COMMIT}"


OTHER_FORMATS = (
    "onnx/model.onnx",
    "consolidated.safetensors",
    "consolidated.safetensors.index.json",
)


class Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks of its server to fetch a repository."""

    model: Path
    asked: list[str]

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{NAME}/tree/"):
            files = [
                {"type": "file", "path": each.name, "size": each.stat().st_size}
                for each in self.model.iterdir()
            ]
            files += [{"type": "file", "path": path, "size": 1} for path in OTHER_FORMATS]
            return self._send(json.dumps([{**each, "oid": "0" * 40} for each in files]).encode())
        if path.startswith(f"/api/models/{NAME}"):
            siblings = [{"rfilename": file.name} for file in self.model.iterdir()]
            siblings += [{"rfilename": path} for path in OTHER_FORMATS]
            return self._send(
                json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode()
            )
        file = self.model / path.rpartition("/")[2]
        if path.startswith(f"/{NAME}/resolve/{COMMIT}/") and file.is_file():
            return self._send(file.read_bytes())
        self.send_error(404)

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def endpoint(model: Path) -> Iterator[str]:
    Hub.model, Hub.asked = model, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@THOROUGH
def test_a_server_is_asked_once(model: Path, endpoint: str, tmp_path: Path) -> None:
    words = (
        "sample",
        "--model",
        f"{NAME}@main",
        "--prompt",
        "the cat",
        "--tokens",
        "5",
        "--temperature",
        "0",
    )
    given = {
        "HF_HOME": str(tmp_path),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    fetched = run(*words, **given)
    assert fetched.returncode == 0, fetched.stderr
    assert fetched.stdout == run(*words[:2], str(model), *words[3:]).stdout
    assert not [path for path in Hub.asked if path.endswith(OTHER_FORMATS)]
    snapshot = tmp_path / "hub" / "models--somebody--tiny" / "snapshots" / COMMIT
    assert torch.equal(*(_tensor(each) for each in (snapshot, model)))
    count = len(Hub.asked)
    assert (
        run(*words, **{**given, "HF_HUB_OFFLINE": "1"}).stdout == fetched.stdout
        and len(Hub.asked) == count
    )


@THOROUGH
def test_a_check_fetches_no_weights(endpoint: str, tmp_path: Path) -> None:
    write_config(tmp_path / "config.json")
    given = {
        "HF_HOME": str(tmp_path),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    words = ("check", str(tmp_path / "config.json"), "--from", "runs/other")
    checked = run(*words, **given)
    assert checked.returncode == 1 and not checked.stderr, "the corpus is missing"
    assert Hub.asked and not [path for path in Hub.asked if path.endswith(".safetensors")]
    lines = checked.stdout.splitlines()
    assert NAME not in lines[0], "a run fetches it"
    assert (
        f"not here   {NAME}@{COMMIT}, which a run needs and asks the Hugging Face hub for" in lines
    )
    assert lines[-1] == "unchecked  --from runs/other: first add the missing files"


def _tensor(directory: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")["transformer.wte.weight"]
