"""A draft in a quarter of an hour, on a machine with one large GPU that is there for no longer.

That machine has torch, transformers and safetensors, no network, and takes at most 64 MiB at a time.
So the work is packed here (pack.py), carried over in parts and put together there (unpack.py), and one
command does the rest by the clock (clock.py, run.py): the target writes the data (decoder.py,
generate.py), drafts are trained (train.py) and decoded with (evaluate.py), and the best one comes back
as shards (export.py), which are joined here.
"""
