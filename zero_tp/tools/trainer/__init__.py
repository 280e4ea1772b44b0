"""An ordinary script of transformers' Trainer becomes tensor-parallel: `ZeroTPTrainer` in the
place of `Trainer`.
"""

from zero_tp.tools.trainer.trainer import TensorParallel, ZeroTPTrainer

__all__ = ["TensorParallel", "ZeroTPTrainer"]
