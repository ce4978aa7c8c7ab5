# What `python train.py` does without a config: a 1 M parameter Llama on bytes, from scratch, on a laptop's CPU.
# Text: Python's own language reference, which comes with Python (about 460,000 characters).
# 8 rows x 256 tokens = 2,048 tokens a step; 300 steps see the text 1.6 times. About two minutes on two cores.
# Expect: validation loss from 6.2 (= ln 512) to about 1.9; single bytes alone would allow about 3.2.
max_steps = 300
