from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from zero_tp import ZeroTPTrainer  # was: from transformers import Trainer

MODEL, LENGTH = "exports/quickstart", 128  # a directory, or a name on the hub

args = TrainingArguments(
    "out",
    deepspeed="ds.json",
    per_device_train_batch_size=4,
    max_steps=20,
    learning_rate=1e-4,
    logging_steps=5,
    save_strategy="no",
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
)
text = Path("text.txt").read_text()
tokens = AutoTokenizer.from_pretrained(MODEL)(text, verbose=False)["input_ids"]
rows = [tokens[first : first + LENGTH] for first in range(0, len(tokens) - LENGTH, LENGTH)]
trainer = ZeroTPTrainer(
    AutoModelForCausalLM.from_pretrained(MODEL),
    args,
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    tensor_parallel=2,
)
trainer.train()
trainer.save_model("exports/tuned")  # opens in transformers
