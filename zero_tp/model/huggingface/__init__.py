"""PreTrainedModels with Hugging Face's own configs.

transformers' Trainer, `generate` and accelerate take them.
"""

from zero_tp.model.huggingface.for_causal_lm import ZeroTPForCausalLM
from zero_tp.model.huggingface.for_pretraining import ZeroTPForPreTraining
from zero_tp.model.huggingface.model import HuggingFaceModel
from zero_tp.model.huggingface.parallelize import parallel_model

__all__ = ["HuggingFaceModel", "ZeroTPForCausalLM", "ZeroTPForPreTraining", "parallel_model"]
