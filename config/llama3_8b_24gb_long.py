# Llama-3 8B on a 24 GB card with 65,536 tokens a step: 32 rows of 2048, as 16 micro-batches of 2 rows.
#
#   python train.py config/llama3_8b_24gb_long.py --data=chats.jsonl
#
# The 16 micro-batches go through each block together, so gradients and optimizer states pass once per step, as for one.
# GPU, GB:  as config/llama3_8b_24gb.py, plus 3 x 0.54 for one block's inputs and their gradients
# host, GB: optimizer states 16.3 + block inputs 17.2 (65,536 tokens x 8 KB x 32 blocks) + torch 3

from runpy import run_path as _run_path

globals().update({k: v for k, v in _run_path(__file__.replace("_long.py", ".py")).items() if not k.startswith("_")})
out_dir = "out-llama3-8b-long"
gradient_accumulation_steps = 16
learning_rate = 2e-5
warmup_steps = 20
eval_every = 50
save_every = 100
