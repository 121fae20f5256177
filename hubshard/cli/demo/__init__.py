"""`hubshard demo`, and the programs that it starts."""
