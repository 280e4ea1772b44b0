"""Libraries' output is hidden, and shown if a block fails."""

from __future__ import annotations

import logging
import warnings

import pytest

from zero_tp.run.process import quiet


def test_warnings_and_records_below_error_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("DeepSpeed")
    monkeypatch.setattr(quiet, "ENVIRONMENT", {})
    monkeypatch.setattr(quiet, "LOGGERS", ("DeepSpeed",))
    monkeypatch.setattr(logger, "filters", list(logger.filters))
    with warnings.catch_warnings(record=True) as caught:
        quiet.quiet_libraries(verbose=False)
        warnings.warn_explicit(
            "old", FutureWarning, "c10d_logger.py", 83, module="torch.distributed.c10d_logger"
        )
        warnings.warn(
            "`torch.distributed.all_gather_into_tensor` is deprecated.", FutureWarning, stacklevel=1
        )
        warnings.warn("ours", UserWarning, stacklevel=1)
    assert [str(each.message) for each in caught] == ["ours"]
    shown = [
        logger.filter(logging.LogRecord("", level, "", 0, "", None, None))
        for level in (logging.WARNING, logging.ERROR)
    ]
    assert list(map(bool, shown)) == [False, True]


def test_hidden_output_is_shown_if_the_block_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet.suppress_output():
        print("built successfully")
    assert capsys.readouterr() == ("", "")
    with pytest.raises(RuntimeError), quiet.suppress_output():
        print("compiling")
        raise RuntimeError
    assert capsys.readouterr().err == "compiling\n"
