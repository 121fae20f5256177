"""Where tensors come from: safetensors checkpoints, state dicts and models. Each is a `hubshard.protocols.Source`.

This package imports nothing by itself; take what you need from its modules.
"""
