"""From the copy of a state to the disk and to the Hub, behind the training."""
