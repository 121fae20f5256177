"""The storage and planners of PyTorch's distributed checkpoint (DCP), without pickles."""
