"""Which samples come when, and how a loader goes on behind the batch that was trained on."""
