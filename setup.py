"""A wheel holds, beside the library, what `zero_tp.base.shipped` finds: configs, corpus, and
scripts for launchers.

Everything else about the package stands in setup.cfg.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CONFIGS = ("ds_configs/*.json", "ds_configs/papers/*.json")
SHIPPED = (
    *CONFIGS,
    "launch/corpus/*",
    "launch/pretrain.py",
    "launch/finetune.py",
    "eval/zero_shot.py",
)
PLACE = Path("zero_tp", "_shipped")


class WithShipped(build_py):
    """An editable installation copies nothing: the files are found in the checkout."""

    def run(self) -> None:
        super().run()
        for file in [] if self.editable_mode else self._shipped():
            target = Path(self.build_lib, PLACE, file)
            self.mkpath(str(target.parent))
            self.copy_file(str(file), str(target))

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *map(str, self._shipped())]

    def _shipped(self) -> list[Path]:
        return sorted(file for pattern in SHIPPED for file in Path().glob(pattern))


setup(cmdclass={"build_py": WithShipped})
