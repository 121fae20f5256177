"""How the processes of a job talk to each other, beside what their training does: never by pickle, which runs code.

A layer of its own, below publishing and resuming. What imports torch says so; import that only where it is at hand.
"""
