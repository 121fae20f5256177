"""All of the state of a run, as tensors and plain values, and back."""
