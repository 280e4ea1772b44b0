"""The README's examples hold: its config loads, its files exist, its commands know the options
it gives them.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from zero_tp.__main__ import parser
from zero_tp.commands import COMMANDS
from zero_tp.run.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_config_is_right(tmp_path: Path) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "run.json"
    path.write_text(block)
    config = RunConfig.load(path, world_size=4)
    assert (config.global_batch, config.data_parallel, config.zero_stage, config.dtype) == (
        16,
        2,
        2,
        "bf16",
    )


def test_the_page_on_architectures_shows_the_table_as_it_is() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    tables = ROOT / "zero_tp" / "model" / "architectures"
    shown = [(tables / f"{name}.py").read_text() for name in ("exaone4", "starcoder2")]
    pieces = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert len(pieces) > 5 and not [
        piece for piece in pieces if not any(piece in table for table in shown)
    ]
    named = set(re.findall(r"(?:tests|zero_tp)/[\w./]+\.py", page))
    assert len(named) > 4 and not [name for name in named if not (ROOT / name).exists()]


def test_every_file_that_is_named_exists() -> None:
    named = set(
        re.findall(
            r"(?<![\w/])(?:launch|eval|tests|docs|ds_configs|benchmarks)/[\w./-]+\.\w+", README
        )
    )
    assert {"launch/quickstart.sh", "tests/run.sh", "docs/config.md"} <= named
    assert not [name for name in named if not (ROOT / name).exists()]


def commands_of(page: Path) -> list[tuple[list[str], list[str]]]:
    """The launcher's words and those of `zero-tp`, of each such command in the page's shell
    blocks.
    """
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    text = re.sub(
        r"\$\(zero-tp path (pretrain|evaluate)\)",
        r"zero-tp \1",
        "".join(blocks).replace("\\\n", ""),
    )
    text = text.replace("$(zero-tp path corpus)", "CORPUS")
    variables = dict(re.findall(r"^(\w+)=\"(.*)\"$", text, re.MULTILINE))
    lines = [
        re.sub(r"\$(\w+)", lambda name: variables[name[1]], line) for line in text.splitlines()
    ]
    words = [shlex.split(line, comments=True) for line in lines]
    places = [(line, line.index("zero-tp")) for line in words if "zero-tp" in line]
    return [(line[:place], line[place + 1 :]) for line, place in places]


COMMANDS_OF_PAGES = [
    command
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"))
    for command in commands_of(page)
]


@pytest.mark.slow
def test_the_runs_that_are_started_have_right_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = RunConfig.load(ROOT / "ds_configs" / "llama_135m.json").hf_config()
    for name in ("models/SmolLM2-135M", "DIR"):
        model.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    sizes = []
    for launcher, words in COMMANDS_OF_PAGES:
        options = parser("zero-tp").parse_args(words)
        config = next(
            filter(None, (getattr(options, name, None) for name in ("deepspeed_config", "file"))),
            None,
        )
        if config is not None and config.exists():
            ranks = (
                launcher[launcher.index("--num_accelerators") + 1]
                if "--num_accelerators" in launcher
                else None
            )
            sizes.append(
                RunConfig.load(config, options.set, int(ranks) if ranks else None).world_size
            )
    assert len(sizes) > 8 and 8 in sizes


@pytest.mark.slow
def test_the_commands_are_such_as_the_parser_takes() -> None:
    assert len(COMMANDS_OF_PAGES) > 30
    for _, words in COMMANDS_OF_PAGES:
        options = parser("zero-tp").parse_args(words)
        given = [getattr(options, name, None) for name in ("file", "deepspeed_config")]
        names = [config for config in given if config is not None and config.name != "FILE"]
        # Else a shipped one's name.
        assert all(config.exists() or config.suffix == ".json" for config in names), words


def test_the_table_has_every_command_with_options_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = re.findall(r"^\| (`zero-tp .*?) \| ", README.replace("\\|", "/"), re.MULTILINE)
    pieces = [piece for row in rows for piece in re.findall(r"`zero-tp (.*?)`", row)]
    assert {piece.split()[0] for piece in pieces} == COMMANDS.keys()
    for piece in pieces:
        name, *words = re.findall(r"^\w+(?: to-hf)?|--[\w-]+", piece)
        with pytest.raises(SystemExit):
            parser("zero-tp").parse_args([*name.split(), "--help"])
        known = capsys.readouterr().out
        assert not [word for word in words if word not in known], piece
