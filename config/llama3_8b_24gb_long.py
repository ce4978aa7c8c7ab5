# Llama-3 8B on a 24 GB card with 65,536 tokens a step: 32 rows of 2048, as 4 micro-batches of 8 rows.
#
#   python train.py config/llama3_8b_24gb_long.py --data=chats.jsonl
#
# The 4 micro-batches go through each block together, so gradients and optimizer states pass once per step, as for one.
# GPU, GB:  weights 16.06 + one block's gradients, fp32 sums and working memory for 16,384 tokens 6.3 (its inputs, their
#           gradients and the next block's inputs among them) + optimizer states on their way 0.7 + context and slack 1.6
#           = 24.6 (22.9 GiB; --batch_size=4 --gradient_accumulation_steps=8 takes 1.7 GB less and 1 % more time)
# host, GB: optimizer states 16.3 + block inputs 17.2 (65,536 tokens x 8 KB x 32 blocks) + torch 2.5

from runpy import run_path as _run_path

globals().update({k: v for k, v in _run_path(__file__.replace("_long.py", ".py")).items() if not k.startswith("_")})
out_dir = "out-llama3-8b-long"
batch_size = 8
gradient_accumulation_steps = 4
state_buffer_gb = 0.7
state_resident_gb = 0.0
learning_rate = 2e-5
warmup_steps = 20
eval_every = 50
save_every = 100
