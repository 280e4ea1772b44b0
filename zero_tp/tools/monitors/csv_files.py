"""DeepSpeed's `csv_monitor`: a file for each logged value."""

from __future__ import annotations

import uuid
from pathlib import Path

from zero_tp.base.errors import UserError
from zero_tp.base.files import write_atomically
from zero_tp.run.metrics_file import append_line
from zero_tp.tools.monitors.run_info import Options, RunInfo, Values


class CsvFiles:
    """Write one file of lines `step,value` for each value, named as DeepSpeed's monitor names them.

    Lines after the step that a run resumes from are removed: those steps are trained again. Another
    run's files are refused; the file `run_id` names the run that the directory belongs to.
    """

    def __init__(self, block: Options, run: RunInfo) -> None:
        self.directory = Path(
            block.get("output_path") or run.directory / "csv", block.get("job_name") or run.name
        )
        self.directory.mkdir(parents=True, exist_ok=True)
        # A directory in the config may be shared by runs of the same job_name, and rewriting would
        # cut the other run's files.
        owner = self.directory / "run_id"
        run_id = run.saved_id("csv_monitor") or uuid.uuid4().hex
        if owner.exists() and owner.read_text() != run_id:
            raise UserError(
                f"{self.directory} has another run's values; set another job_name, or remove it"
            )
        write_atomically(owner, run_id)
        run.save_run_id("csv_monitor", run_id)
        for path in filter(Path.is_file, self.directory.glob("*.csv")):
            # A run that resumes from step 2; the last line was being written when it was killed:
            #
            #     step,loss      step,loss
            #     1,4.1          1,4.1
            #     2,3.9          2,3.9
            #     3,3.            (removed, as a whole line of step 3 would be)
            lines = path.read_text(errors="replace").splitlines(keepends=True)
            header, *rows = [
                line.rstrip("\n").split(",") for line in lines if line.endswith("\n")
            ] or [[]]
            if (
                len(header) != 2
                or header[0] != "step"
                or not path.name.endswith(_file_name(header[1]))
            ):
                continue  # not written by this class
            rows = [
                row
                for row in rows
                if len(row) == 2 and row[0].isdecimal() and int(row[0]) <= run.step
            ]
            write_atomically(path, "".join(f"{','.join(row)}\n" for row in (header, *rows)))

    def log(self, values: Values, step: int) -> None:
        for name, value in values.items():
            path = self.directory / _file_name(name)
            # Only the last part of a name is in the header, as DeepSpeed's monitor writes it; the
            # file's name has all parts.
            header = (
                "" if path.exists() and path.stat().st_size else f"step,{name.rsplit('/', 1)[-1]}\n"
            )
            append_line(path, f"{header}{step},{value}\n".encode())

    def finish(self) -> None:
        """Nothing is left to write."""


def _file_name(value_name: str) -> str:
    return f"{value_name.replace('/', '_').replace(' ', '_')}.csv"
