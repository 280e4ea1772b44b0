"""Files that are not read: too long, no file, or not one object of strict JSON."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zero_tp.base.files import MAX_FILE_BYTES
from zero_tp.run.config import ConfigError, RunConfig


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,\n "b" 2}', "line 2 column 6"),
        ('{"a": 1, "a": 2}', '"a" appears twice'),
        ("[1]", "not an object"),
        ('{"gradient_clipping": NaN}', "NaN is not a finite number"),
        ('{"gradient_clipping": 1e999}', "1e999 is not a finite number"),
        ('{"gradient_clipping": ' + "9" * 101 + "}", "an integer of 101 digits"),
        ('{"gradient_clipping": -' + "9" * 4301 + "}", "an integer of 4,301 digits"),
        ('{"gradient_clipping": ' + "[" * 200 + "]" * 200 + "}", "nested too deeply"),
        ('{"gradient_clipping": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_files_that_are_not_one_json_object(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(path)
    assert str(caught.value).startswith(str(path)) and words in str(caught.value)


def test_what_is_too_long_or_no_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(
        ConfigError, match=r"can't be read \(268,435,457 bytes, at most 268,435,456 are read\)"
    ):
        RunConfig.load(path)
    path.unlink()
    with pytest.raises(ConfigError, match="no such file"):
        RunConfig.load(path)
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"can't be read \(not a regular file\)"):
        RunConfig.load(path)
