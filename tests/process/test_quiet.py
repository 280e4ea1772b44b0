"""What other libraries print is held back, and comes out where a block fails."""

from __future__ import annotations

import warnings

import pytest


def test_quiet_filters_warnings_and_records_below_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    from zero_tp.process import quiet

    logger = logging.getLogger("DeepSpeed")
    filters = list(logger.filters)
    monkeypatch.setattr(quiet, "ENVIRONMENT", {})
    try:
        with warnings.catch_warnings(record=True) as caught:
            quiet.quiet_libraries(verbose=False)
            warnings.warn_explicit("old", FutureWarning, "c10d_logger.py", 83, module="torch.distributed.c10d_logger")
            warnings.warn("`torch.distributed.all_gather_into_tensor` is deprecated.", FutureWarning, stacklevel=1)
            warnings.warn("ours", UserWarning, stacklevel=1)
        assert [str(each.message) for each in caught] == ["ours"]
        assert not logger.filter(logging.LogRecord("DeepSpeed", logging.WARNING, "", 0, "", None, None))
        assert logger.filter(logging.LogRecord("DeepSpeed", logging.ERROR, "", 0, "", None, None))
    finally:
        logger.filters[:] = filters


def test_hushed_output_comes_back_when_the_block_fails(capsys: pytest.CaptureFixture[str]) -> None:
    from zero_tp.process.quiet import suppress_output

    with suppress_output(verbose=False):
        print("built successfully")
    assert capsys.readouterr() == ("", "")
    with pytest.raises(RuntimeError), suppress_output(verbose=False):
        print("compiling")
        raise RuntimeError
    assert capsys.readouterr().err == "compiling\n"
