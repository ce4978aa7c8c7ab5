# A real finetune without an account: SmolLM2-135M-Instruct on 900 Alpaca rows. First: python tests/smollm2.py
# 2 GB of memory; on a GPU under a minute for an epoch, on two CPU cores 13 s a step.
# Expect (CPU, float32, 30 steps of 2 rows x 512 tokens): validation loss from about 1.6 to about 1.5.

init_from = "weights/smollm2-135m-instruct"
data = "weights/alpaca_en_demo.json"
out_dir = "out-smollm2"

seq_len = 512
batch_size = 2
max_steps = None
epochs = 1.0

learning_rate = 2e-5
min_lr = 0.0
warmup_steps = 5
weight_decay = 0.0

eval_every = 50
sample_tokens = 0
