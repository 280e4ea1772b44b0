import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from zero_tp import TrainingEngine, ZeroTPForCausalLM, connect

STEPS = 160
LENGTH = 96
TEXT = (
    b"Fourscore and seven years ago our fathers brought forth, upon this continent, a new nation. "
    * 20
)

# Join the ranks that a launcher started, which sets WORLD_SIZE; without a launcher there is one.
topology, device = connect(tensor=2 if "WORLD_SIZE" in os.environ else 1, sequence=True)

# transformers' config for the model, DeepSpeed's for the engine, with the refusals of a run's file.
config = LlamaConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,  # bytes are the tokens here
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=None,
)
deepspeed_config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
engine = TrainingEngine.from_dict(
    config, topology, deepspeed_config, seed=1234, device=device, model=ZeroTPForCausalLM
)

# Ranks of a TP group see the same rows, each data-parallel group sees its own.
tokens = torch.tensor(list(TEXT))
draw = torch.Generator().manual_seed(topology.data_rank)
for step in range(1, STEPS + 1):
    begin = torch.randint(len(tokens) - LENGTH, (4,), generator=draw)
    rows = torch.stack([tokens[first : first + LENGTH + 1] for first in begin]).to(device)
    engine.run_step([(rows[:, :-1], rows[:, 1:])])
    if topology.rank == 0 and step % 20 == 0:  # the loss is the mean over all ranks
        print(f"step {step}: loss {engine.loss:.4f}, gradient norm {engine.gradient_norm:.4f}")

# Every rank calls it; what it writes is a Hugging Face model.
engine.model.save_pretrained("exports/tiny_llama")
if topology.rank == 0:
    model = AutoModelForCausalLM.from_pretrained("exports/tiny_llama")
    prompt = torch.tensor([list(b"Fourscore and seven")])
    answer = model.generate(prompt, max_new_tokens=72, do_sample=False)
    print(bytes(answer[0].tolist()).decode())
dist.destroy_process_group()
