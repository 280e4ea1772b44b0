"""Models as Hugging Face's libraries know them: PreTrainedModels whose config is the native one.

They pass the contract that transformers' Trainer and accelerate have with a model.
"""

from zero_tp.huggingface.causal_lm import ZeroTPForCausalLM
from zero_tp.huggingface.convert import parallel_model
from zero_tp.huggingface.masked_lm import ZeroTPForPreTraining
from zero_tp.huggingface.model import HuggingFaceModel

__all__ = ["HuggingFaceModel", "ZeroTPForCausalLM", "ZeroTPForPreTraining", "parallel_model"]
