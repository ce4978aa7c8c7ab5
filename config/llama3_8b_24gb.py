# Full-parameter finetuning of Llama-3 8B on one 24 GB card, 2 x 2048 packed tokens a step.
#
#   python train.py config/llama3_8b_24gb.py --data=chats.jsonl
#
# GPU, GB:  weights 16.06 + the fullest moment, the head's gradient, 3.1 + optimizer states passing through 1.0, and those of
#           head, embedding and more that stay 2.4 + context and slack 1.2                             = 23.8 (22.1 GiB)
# host, GB: optimizer states 13.9 (2 bytes a parameter) + block inputs 1.07 (8 KB a token and block) + torch 2.5
# PCIe:     13.9 GB of states in and out per step, hidden behind compute where the link allows

init_from = "Meta-Llama-3-8B"      # the folder you downloaded; --init_from=scratch --tokenizer=... trains from nothing
out_dir = "out-llama3-8b"

model = "llama3_8b"                # its shape, for --dry_run before the weights are there

seq_len = 2048
batch_size = 2
gradient_accumulation_steps = 1
max_steps = None                   # from epochs
epochs = 1.0

learning_rate = 1e-5
min_lr = 0.0
warmup_steps = 100
weight_decay = 0.0
beta2 = 0.95

dtype = "bfloat16"                 # weights are rounded stochastically: small updates are not lost
compile = True
activation_checkpointing = True
activation_offloading = True
state_resident_gb = 2.4            # lower this first if your desktop uses the card too

val_fraction = 0.02
eval_every = 500
eval_batches = 100
save_every = 1000                  # 32 GB each
keep_checkpoints = 1
sample_tokens = 0
